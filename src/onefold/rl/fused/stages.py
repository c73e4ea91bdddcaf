"""A stage of IMPALA as one differentiable function, in bfloat16 on a GPU: conv 3×3, max-pool 3/2, two residual units.

cuDNN's convolutions of 16 to 64 channels take four times as long as their bytes and operations require, and every
intermediate result goes through memory. Here a thread block keeps an image in shared memory for a whole stage
(`stage.cu`): six kernels for three stages forward, eleven backward.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from jaxtyping import BFloat16, Float
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from onefold.rl.fused.nvrtc import Kernel, available, compile_module

TAPS = 9  # weights of a 3×3 filter
SLICE = 32  # output channels of a block in the weight gradients
MOST_PIXELS = 640  # whose sums the warps of a block hold at a time
BLOCKS = 264  # two for each multiprocessor of a large GPU
MOST_PARTIAL_BYTES = 10_000_000  # of partial sums of the weight gradients


@dataclass(frozen=True)
class StageShape:
    """Input and output channels of a stage, and the side of its square input in pixels.

    The other properties are how the kernels divide the work; `stage.cu` gets them as macros.
    """

    inputs: int
    outputs: int
    side: int

    @property
    def pooled_side(self) -> int:
        """Side of the output."""
        return (self.side + 1) // 2

    @property
    def images_per_block(self) -> int:
        """Images of a thread block; two small images share the weights."""
        return 1 if self.side > 11 else 2

    @property
    def pooled_rows(self) -> int:
        """Rows of the pooled image that a block computes at a time."""
        if self.images_per_block * self.side**2 <= MOST_PIXELS:
            return self.pooled_side
        return (MOST_PIXELS // self.side - 1) // 2

    @property
    def gradient_rows(self) -> int:
        """Rows of the entry's gradient that a block processes at a time: all, or an even number."""
        return self.side if self.side <= 21 else 14

    @property
    def entry_columns(self) -> int:
        """Columns of the entry's weight matrix, padded to a multiple of 16."""
        return -(-TAPS * self.inputs // 16) * 16

    @property
    def is_supported(self) -> bool:
        """Whether the kernels support these sizes."""
        channels = self.inputs in (8, 16, 32, 64) and self.outputs in (16, 32, 64)
        fits = self.images_per_block * self.pooled_side**2 <= MOST_PIXELS and self.pooled_rows >= 1
        return channels and 3 <= self.side <= 64 and fits

    @property
    def macros(self) -> dict[str, int]:
        """Macros that `stage.cu` is compiled with."""
        most_rows = min(2 * self.pooled_rows + 1, self.side)
        return {
            "CIN": self.inputs, "COUT": self.outputs, "SIDE": self.side, "IMAGES": self.images_per_block,
            "ROWS": self.pooled_rows, "ENTRY_STRIP": self.gradient_rows,
            "ENTRY_WARPS": _warps(self.images_per_block * most_rows * self.side, self.outputs),
            "UNITS_WARPS": _warps(self.images_per_block * self.pooled_side**2, self.outputs),
            "ENTRY_BACKWARD_WARPS": _warps(self.side**2, self.inputs),
        }  # fmt: skip

    def threads_per_block(self) -> dict[str, int]:
        """Return the number of threads per block of each kernel."""
        macros, across = self.macros, 32 * max(1, self.outputs // 32)
        entry, units = macros["ENTRY_WARPS"] * across, macros["UNITS_WARPS"] * across
        return {
            "entry_forward": entry,
            "entry_inference": entry,
            "units_forward": units,
            "units_backward": units,
            "entry_backward": macros["ENTRY_BACKWARD_WARPS"] * 32 * max(1, self.inputs // 32),
            "entry_weight_gradient": 32 * TAPS,
            "units_weight_gradient": 32 * TAPS,
        }

    def shared_memory(self) -> dict[str, int]:
        """Return the bytes of shared memory per block of each kernel."""
        entry_weights = self.outputs * (2 * self.entry_columns + 16)
        unit_weights = self.outputs * (2 * TAPS * self.outputs + 16)
        most_rows, stride = min(2 * self.pooled_rows + 1, self.side), 2 * self.outputs + 16
        pooled = self.images_per_block * _image_bytes(self.pooled_side, self.outputs)
        image = _image_bytes(self.side, self.inputs)
        entry = self.images_per_block * (image + most_rows * self.side * stride) + entry_weights
        memory = {
            "entry_forward": entry,
            "entry_inference": entry,
            "units_forward": 2 * pooled + unit_weights,
            "units_backward": 2 * pooled + unit_weights,
            "entry_weight_gradient": _weight_gradient_bytes(self.side, self.gradient_rows, self.inputs, self.outputs),
            "units_weight_gradient": _weight_gradient_bytes(
                self.pooled_side, self.pooled_side, self.outputs, self.outputs
            ),
        }
        if self.inputs >= 16:  # the first stage needs no gradient of its images
            memory["entry_backward"] = _image_bytes(self.side, self.outputs) + entry_weights
        return memory


def _warps(pixels: int, channels: int) -> int:
    """Return how many warps share these pixels, 16 at a time and at most 80 each, with the fewest idle."""
    tiles, most = -(-pixels // 16), 8 if channels <= 32 else 5
    choices = [n for n in range(1, most + 1) if -(-tiles // n) <= 5]
    return min(choices, key=lambda n: (-(-tiles // n) * n, -n), default=most)


def _weight_gradient_bytes(side: int, rows: int, inputs: int, outputs: int) -> int:
    """Return the shared memory of a weight gradient kernel.

    It holds an image and some rows of a gradient, later the sums that warps exchange, and the zeros that the kernel
    reads past the end of a small image.
    """
    stride, gap, row = _pixel_stride(inputs), _row_gap(inputs), _row_stride(side, inputs)
    slice_, top = min(SLICE, outputs), (side - 1) // rows * rows
    exchanged = (TAPS * inputs + 24) * slice_ if slice_ * inputs <= 512 else 0
    last = -(-(side - top) * side // 16) * 16 - 1
    read = gap + (top + last // side + 2) * row + (last % side + 2) * stride
    return max(_image_bytes(side, inputs) + (rows * side + 1) * (2 * slice_ + 16), 4 * exchanged, read)


# The memory layout of an image, as `Plane` in `stage.cu` has it.
def _pixel_stride(channels: int) -> int:
    """Return the bytes from a pixel to the next."""
    return 16 if channels == 8 else 2 * channels + 16


def _row_gap(channels: int) -> int:
    """Return the bytes of zeros between two rows."""
    return -(-_pixel_stride(channels) // 128) * 128


def _row_stride(side: int, channels: int) -> int:
    """Return the bytes from a row to the next."""
    return side * _pixel_stride(channels) + _row_gap(channels)


def _image_bytes(side: int, channels: int) -> int:
    """Return the bytes of one image with zeros around it."""
    return _row_gap(channels) + (side + 2) * _row_stride(side, channels)


def stage_shapes(shape: tuple[int, int, int], channels: Sequence[int]) -> list[StageShape]:
    """Return the stages of a network, with input channels padded to a multiple of 8.

    Images that are not square give shapes that no kernel supports.
    """
    inputs, height, width = shape
    side, stages = height if height == width else 0, []
    for count in channels:
        stages.append(StageShape(-(-inputs // 8) * 8, count, side))
        inputs, side = count, (side + 1) // 2
    return stages


def supports(shape: tuple[int, int, int], channels: Sequence[int], device: torch.device) -> bool:
    """Return True if the kernels support all stages of this network on this device."""
    return are_supported(stage_shapes(shape, channels), device)


def are_supported(shapes: Sequence[StageShape], device: torch.device) -> bool:
    """Return True if the kernels support these stages on this device: Hopper or newer, with the run-time compiler."""
    if device.type != "cuda" or not all(shape.is_supported for shape in shapes) or not available():
        return False
    properties = torch.cuda.get_device_properties(device)
    most = getattr(properties, "shared_memory_per_block_optin", 0)
    return properties.major >= 9 and all(size <= most for shape in shapes for size in shape.shared_memory().values())


def stack_images(x: Sequence[Float[Tensor, "n c s s"]]) -> BFloat16[Tensor, "k n s s i"]:
    """Return the images of k networks as the input of `stage`: channels last, padded to a multiple of 8."""
    images = torch.stack(list(x)).movedim(2, 4)
    return F.pad(images, (0, -images.shape[4] % 8)).bfloat16().contiguous()


def stage(
    x: BFloat16[Tensor, "k n s s i"],
    entry: Float[Tensor, "k o _ 3 3"],
    entry_bias: Float[Tensor, "k o"],
    units: Float[Tensor, "k 4 o o 3 3"],
    units_bias: Float[Tensor, "k 4 o"],
) -> BFloat16[Tensor, "k n p p o"]:
    """Return the outputs of k stages for n images each: h = pool(W∗x), then twice h + W₂∗relu(W₁∗relu(h)).

    Args:
        x: Images, channels last; see `stack_images`.
        entry: Weights of the first convolution.
        entry_bias: Biases of the first convolution.
        units: Weights of the four convolutions of the residual units.
        units_bias: Biases of these convolutions.

    Returns:
        Pooled images, channels last.
    """
    padded = F.pad(entry, (0, 0, 0, 0, 0, x.shape[4] - entry.shape[2])).movedim(2, 4).flatten(2)
    entry_matrix = F.pad(padded, (0, -TAPS * x.shape[4] % 16)).contiguous()
    unit_matrices = units.movedim(3, 5).flatten(3).contiguous()
    low_precision = entry_matrix.detach().bfloat16(), unit_matrices.detach().bfloat16()
    biases = entry_bias.float().contiguous(), units_bias.float().contiguous()
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x, entry, entry_bias, units, units_bias))
    return _forward(x, entry_matrix, biases[0], unit_matrices, biases[1], *low_precision, keep)[0]


@torch.library.custom_op("onefold::stage", mutates_args=())
def _forward(
    x: Tensor,
    entry: Tensor,
    entry_bias: Tensor,
    units: Tensor,
    units_bias: Tensor,
    low_entry: Tensor,
    low_units: Tensor,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the outputs and, for the backward pass, the pooled images, the positions of their maxima and activations.

    The weights are passed twice: in bfloat16 for the computation, and in float32, whose gradients they receive.
    """
    shape, (sets, n) = _shape(x, entry), x.shape[:2]
    out, pooled, codes, kept = _forward_shapes(x, entry, entry_bias, units, units_bias, low_entry, low_units, keep)
    kernels, blocks = _kernels(shape, x.device), (-(-n // shape.images_per_block), sets, 1)
    if keep:
        kernels["entry_forward"](blocks, x, low_entry, entry_bias, pooled, codes, n)
    else:
        kernels["entry_inference"](blocks, x, low_entry, entry_bias, pooled, n)
    kernels["units_forward"](blocks, pooled, low_units, units_bias, out, kept if keep else None, n)
    return out, pooled, codes, kept


@_forward.register_fake
def _forward_shapes(
    x: Tensor,
    entry: Tensor,
    entry_bias: Tensor,
    units: Tensor,
    units_bias: Tensor,
    low_entry: Tensor,
    low_units: Tensor,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del entry_bias, units, units_bias, low_entry, low_units
    shape, (sets, n) = _shape(x, entry), x.shape[:2]
    output = (sets, n, shape.pooled_side, shape.pooled_side, shape.outputs)
    codes, kept = (output, (3, *output)) if keep else ((0,), (0,))
    return x.new_empty(output), x.new_empty(output), x.new_empty(codes, dtype=torch.uint8), x.new_empty(kept)


@torch.library.custom_op("onefold::stage_back", mutates_args=())
def _backward(
    grad: Tensor,
    x: Tensor,
    low_entry: Tensor,
    low_units: Tensor,
    pooled: Tensor,
    codes: Tensor,
    kept: Tensor,
    needs_input_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of x if needed, of the entry [k, parts, O · 9 · I + O], biases last, and of the units [4 k, …].

    The caller adds up the parts, so that a compiler can fuse the sums with what follows.
    """
    shape, (sets, n) = _shape(x, low_entry), x.shape[:2]
    kernels, blocks = _kernels(shape, x.device), (-(-n // shape.images_per_block), sets, 1)
    grads, middle = grad.new_empty(3, *grad.shape), torch.empty_like(grad)
    kernels["units_backward"](blocks, pooled, kept, low_units, grad, grads, middle, n)
    down = torch.empty_like(x) if needs_input_grad else x.new_empty(0)
    if needs_input_grad:
        kernels["entry_backward"]((n, sets, 1), middle, codes, low_entry, down, n)
    entry = _parts(shape.outputs, shape.inputs, sets, n, grad)
    slices = max(1, shape.outputs // SLICE)
    kernels["entry_weight_gradient"]((entry.shape[1], sets, slices), x, middle, codes, entry, n)
    units = _parts(shape.outputs, shape.outputs, 4 * sets, n, grad)
    kernels["units_weight_gradient"]((units.shape[1], sets, 4 * slices), pooled, kept, grad, grads, units, n)
    return down, entry, units


def _parts(outputs: int, inputs: int, jobs: int, n: int, like: Tensor) -> Tensor:
    """Return an empty tensor for the partial sums of the weight gradients, one part per block of a convolution."""
    size = outputs * TAPS * inputs + outputs
    blocks = BLOCKS // (jobs * max(1, outputs // SLICE))
    parts = max(1, min(n, blocks, MOST_PARTIAL_BYTES // (4 * size * jobs)))
    return like.new_empty(jobs, parts, size, dtype=torch.float32)


@_backward.register_fake
def _backward_shapes(
    grad: Tensor,
    x: Tensor,
    low_entry: Tensor,
    low_units: Tensor,
    pooled: Tensor,
    codes: Tensor,
    kept: Tensor,
    needs_input_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    del low_units, pooled, codes, kept
    shape, (sets, n) = _shape(x, low_entry), x.shape[:2]
    entry = _parts(shape.outputs, shape.inputs, sets, n, grad)
    units = _parts(shape.outputs, shape.outputs, 4 * sets, n, grad)
    return torch.empty_like(x) if needs_input_grad else x.new_empty(0), entry, units


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, *_, low_entry, low_units, _ = inputs
    ctx.save_for_backward(x, low_entry, low_units, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
    del others
    x, low_entry, low_units, *rest = ctx.saved_tensors
    needs_input_grad, (sets, outputs, columns), inputs = ctx.needs_input_grad[0], low_entry.shape, x.shape[4]
    down, entry, units = _backward(grad.contiguous(), x, low_entry, low_units, *rest, needs_input_grad)
    entry_grad, bias = entry.sum(1).split([outputs * TAPS * inputs, outputs], -1)
    units_grad, units_bias = units.sum(1).view(sets, 4, -1).split([outputs * TAPS * outputs, outputs], -1)
    entry_grad = F.pad(entry_grad.reshape(sets, outputs, -1), (0, columns - TAPS * inputs))
    units_grad = units_grad.reshape(low_units.shape)
    input_grad = down if needs_input_grad else None
    return input_grad, entry_grad, bias.contiguous(), units_grad, units_bias.contiguous(), None, None, None


_forward.register_autograd(_gradients, setup_context=_setup_context)


def _shape(x: Tensor, entry: Tensor) -> StageShape:
    return StageShape(inputs=x.shape[4], outputs=entry.shape[1], side=x.shape[2])


@functools.cache
def _kernels(shape: StageShape, device: torch.device) -> dict[str, Kernel]:
    """Return the kernels compiled for this stage and device."""
    with torch.cuda.device(device):
        source = resources.files("onefold.rl.fused").joinpath("stage.cu").read_text()
        module = compile_module(source, shape.macros, torch.cuda.get_device_capability(device))
        threads = shape.threads_per_block()
        return {name: Kernel(module, name, threads[name], size) for name, size in shape.shared_memory().items()}
