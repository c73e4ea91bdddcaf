"""Compilation and launch of CUDA kernels by NVIDIA's run-time compiler (NVRTC), which is installed with torch."""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onefold.errors import TrainingError

DRIVER = ("libcuda.so.1",)
MAX_DYNAMIC_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Kernel:
    """A kernel of a compiled module, with its threads and its bytes of shared memory per block."""

    def __init__(self, module: ctypes.c_void_p, name: str, threads: int, shared_memory: int) -> None:
        self.threads, self.shared_memory, self._function = threads, shared_memory, ctypes.c_void_p()
        _driver("cuModuleGetFunction", ctypes.byref(self._function), module, name.encode())
        _driver("cuFuncSetAttribute", self._function, MAX_DYNAMIC_SHARED_MEMORY, shared_memory)

    def __call__(self, grid: tuple[int, int, int], *arguments: Tensor | int | None) -> None:
        """Launch the kernel on the current stream; None is passed as a null pointer."""
        values = [_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _driver("cuLaunchKernel", self._function, *grid, self.threads, 1, 1, self.shared_memory, stream, pointers, None)


def available() -> bool:
    """Return True if the CUDA driver and the compiler are installed."""
    try:
        return torch.version.cuda is not None and bool(_nvrtc_library() and _load_library(DRIVER))
    except TrainingError:
        return False


def compile_module(source: str, macros: dict[str, int], capability: tuple[int, int]) -> ctypes.c_void_p:
    """Return the source compiled for a device of this capability and loaded into the current context."""
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in macros.items()]
    program, module = ctypes.c_void_p(), ctypes.c_void_p()
    _compiler("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"onefold.cu", 0, None, None)
    try:
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if _nvrtc_library().nvrtcCompileProgram(program, len(options), arguments):
            raise TrainingError(f"CUDA: a kernel does not compile: {_read_bytes('ProgramLog', program).decode()}")
        image = _read_bytes("CUBIN", program)
    finally:
        _compiler("nvrtcDestroyProgram", ctypes.byref(program))
    torch.cuda.current_stream()  # makes torch's context current
    _driver("cuModuleLoadData", ctypes.byref(module), image)
    return module


def _read_bytes(what: str, program: ctypes.c_void_p) -> bytes:
    """Return the log or the binary of a compiled program."""
    size = ctypes.c_size_t()
    _compiler(f"nvrtcGet{what}Size", program, ctypes.byref(size))
    content = ctypes.create_string_buffer(size.value)
    _compiler(f"nvrtcGet{what}", program, content)
    return content.raw


def _value(argument: Tensor | int | None) -> Any:
    """Return an argument of a kernel as a C value."""
    if isinstance(argument, int):
        return ctypes.c_int(argument)
    return ctypes.c_void_p(None if argument is None else argument.data_ptr())


def _driver(name: str, *arguments: Any) -> None:
    _call(_load_library(DRIVER), name, *arguments)


def _compiler(name: str, *arguments: Any) -> None:
    _call(_nvrtc_library(), name, *arguments)


def _call(library: ctypes.CDLL, name: str, *arguments: Any) -> None:
    """Call a function of a CUDA library; raise an error if it fails."""
    error = getattr(library, name)(*arguments)
    if error:
        raise TrainingError(f"CUDA: {name} failed (error {error}).")


def _nvrtc_library() -> ctypes.CDLL:
    return _load_library((f"libnvrtc.so.{str(torch.version.cuda).split('.', maxsplit=1)[0]}", "libnvrtc.so"))


@functools.cache
def _load_library(names: Sequence[str]) -> ctypes.CDLL:
    """Return the first of these libraries that loads."""
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise TrainingError(f"CUDA: {names[0]} is not installed.")
