"""Work that does not wait for each other, on streams of its own."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch


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


@functools.cache
def _streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(count)]
