"""CUDA source to functions that launch it, through NVIDIA's run-time compiler, which torch brings along."""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onefold.errors import TrainingError

DRIVER = ("libcuda.so.1",)
LARGE_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Kernel:
    """One function of a compiled source, with its threads a block and its bytes of shared memory."""

    def __init__(self, module: ctypes.c_void_p, name: str, threads: int, shared: int) -> None:
        self.threads, self.shared, self._function = threads, shared, ctypes.c_void_p()
        _driver("cuModuleGetFunction", ctypes.byref(self._function), module, name.encode())
        _driver("cuFuncSetAttribute", self._function, LARGE_SHARED_MEMORY, shared)

    def __call__(self, grid: tuple[int, int, int], *arguments: Tensor | int | None) -> None:
        """On the current stream. None is a pointer to nothing."""
        values = [_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _driver("cuLaunchKernel", self._function, *grid, self.threads, 1, 1, self.shared, stream, pointers, None)


def available() -> bool:
    """Whether there is a driver here, and the compiler."""
    try:
        return torch.version.cuda is not None and bool(_library() and _loaded(DRIVER))
    except TrainingError:
        return False


def module(source: str, sizes: dict[str, int], capability: tuple[int, int]) -> ctypes.c_void_p:
    """The source, compiled for the current device with these definitions."""
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in sizes.items()]
    program, found = ctypes.c_void_p(), ctypes.c_void_p()
    _compiler("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"onefold.cu", 0, None, None)
    try:
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if _library().nvrtcCompileProgram(program, len(options), arguments):
            raise TrainingError(f"a CUDA kernel cannot be compiled: {_bytes('ProgramLog', program).decode()}")
        image = _bytes("CUBIN", program)
    finally:
        _compiler("nvrtcDestroyProgram", ctypes.byref(program))
    torch.cuda.current_stream()  # torch's own context is the one that it is loaded into
    _driver("cuModuleLoadData", ctypes.byref(found), image)
    return found


def _bytes(what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _compiler(f"nvrtcGet{what}Size", program, ctypes.byref(size))
    content = ctypes.create_string_buffer(size.value)
    _compiler(f"nvrtcGet{what}", program, content)
    return content.raw


def _value(argument: Tensor | int | None) -> Any:
    if isinstance(argument, int):
        return ctypes.c_int(argument)
    return ctypes.c_void_p(None if argument is None else argument.data_ptr())


def _driver(name: str, *arguments: Any) -> None:
    _asked(_loaded(DRIVER), name, *arguments)


def _compiler(name: str, *arguments: Any) -> None:
    _asked(_library(), name, *arguments)


def _asked(library: ctypes.CDLL, name: str, *arguments: Any) -> None:
    error = getattr(library, name)(*arguments)
    if error:
        raise TrainingError(f"CUDA's {name} failed with error {error}")


def _library() -> ctypes.CDLL:
    return _loaded((f"libnvrtc.so.{str(torch.version.cuda).split('.', maxsplit=1)[0]}", "libnvrtc.so"))


@functools.cache
def _loaded(names: Sequence[str]) -> ctypes.CDLL:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise TrainingError(f"CUDA's {names[0]} cannot be found")
