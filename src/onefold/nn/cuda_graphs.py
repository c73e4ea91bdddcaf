"""Work on a GPU that waits for nothing that it need not: on streams of its own, and captured as a graph."""

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

EAGER_STEPS = 3  # before a graph is captured: lazy initialisation and compilation happen here
CHATTER = "torch._dynamo.variables.ctx_manager"  # says that optimisers are not profiled


def side_by_side(functions: Sequence[Callable[[], Any]], device: torch.device) -> list[Any]:
    """What the functions return. On a GPU each has a stream of its own, in the backward pass too: a captured graph runs
    them at the same time, and small kernels fill the card together."""
    if device.type != "cuda" or len(functions) == 1 or torch.compiler.is_compiling():
        return [function() for function in functions]
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
    """A step that runs as it is a few times; the next time it is captured, and from then on the graph is replayed.

    It reads and writes the same tensors every time, and draws from these generators only.
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
    """While code is compiled: what torch warns of in its own code is its own affair; float32 is on purpose."""
    logger = logging.getLogger(CHATTER)
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
    return [torch.cuda.Stream(device) for _ in range(count)]
