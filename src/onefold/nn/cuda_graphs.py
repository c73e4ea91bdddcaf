"""CUDA streams and graphs: concurrent functions, and steps that are captured once and replayed."""

import contextlib
import functools
import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

EAGER_STEPS = 3  # before the capture of a graph, for lazy initialisation and compilation
PROFILER_LOGGER = "torch._dynamo.variables.ctx_manager"  # logs that optimisers are not profiled


def side_by_side(functions: Sequence[Callable[[], Any]], device: torch.device) -> list[Any]:
    """Return the results of the functions; on a GPU each runs on a separate stream, in the backward pass too.

    A captured graph runs them concurrently, so that small kernels fill the GPU together.
    """
    if device.type != "cuda" or len(functions) == 1 or torch.compiler.is_compiling():
        return list(map(operator.call, functions))
    main, results = torch.cuda.current_stream(device), []
    streams = [main, *_streams(device, len(functions) - 1)]
    for stream, function in zip(streams, functions, strict=True):
        if stream != main:
            stream.wait_stream(main)
        with torch.cuda.stream(stream):
            results.append(function())
    for stream in streams[1:]:
        main.wait_stream(stream)
    return results


def replayed(
    step: Callable[[], None], device: torch.device, generators: Sequence[torch.Generator] = ()
) -> Callable[[], None]:
    """Return a function that runs `step` eagerly three times, then captures it as a CUDA graph and replays the graph.

    The step must read and write the same tensors every time, and draw from these generators only.
    """
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    eager_left, captured = EAGER_STEPS, False

    def next_step() -> None:
        nonlocal eager_left, captured
        with torch.cuda.device(device):
            if eager_left > 0:
                eager_left -= 1
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side), quietly():
                    step()
                torch.cuda.current_stream().wait_stream(side)
                return
            if not captured:
                for generator in generators:
                    graph.register_generator_state(generator)
                with torch.cuda.graph(graph):
                    step()
                captured = True
            graph.replay()

    return next_step


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress warnings from torch's own code while it compiles; float32 precision is intended."""
    logger = logging.getLogger(PROFILER_LOGGER)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\.")
            yield
    finally:
        logger.setLevel(level)


@functools.cache
def _streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """Return the same streams for every call with the same arguments."""
    return [torch.cuda.Stream(device) for _ in range(count)]
