"""One stage of IMPALA as one differentiable function, in bfloat16 on a GPU: conv 3×3, max-pool 3/2, two residual units.

cuDNN's convolutions of 16 to 64 channels take four times what their bytes and operations would, and everything between
them goes through memory. Here a block of threads keeps an image in its shared memory through a whole stage
(`stage.cu`): six kernels for three stages forwards, eleven backwards.
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

from onefold.rl.fused.compile import Kernel, available, module

TAPS, SLICE = 9, 32
PIXELS = 640  # that a block's warps have sums for at a time
BLOCKS = 264  # two for each multiprocessor of a large GPU
PARTIAL = 10_000_000  # bytes of sums of weights' gradients that are still to be added up


@dataclass(frozen=True)
class Form:
    """Channels in and out of a stage, and pixels a side of what comes in."""

    inputs: int
    outputs: int
    side: int

    @property
    def pooled(self) -> int:
        return (self.side + 1) // 2

    @property
    def images(self) -> int:
        """A block's: small ones share the weights."""
        return 1 if self.side > 11 else 2

    @property
    def rows(self) -> int:
        """Of pooled pictures that are made at a time."""
        return self.pooled if self.images * self.side**2 <= PIXELS else (PIXELS // self.side - 1) // 2

    @property
    def strip(self) -> int:
        """Rows of the entry's gradient that are weighed at a time: all, or an even number."""
        return self.side if self.side <= 21 else 14

    @property
    def flat(self) -> int:
        """A row of the entry's weights, in steps of 16."""
        return -(-TAPS * self.inputs // 16) * 16

    @property
    def possible(self) -> bool:
        channels = self.inputs in (8, 16, 32, 64) and self.outputs in (16, 32, 64)
        return channels and 3 <= self.side <= 64 and self.images * self.pooled**2 <= PIXELS and self.rows >= 1

    @property
    def sizes(self) -> dict[str, int]:
        """What `stage.cu` is to know."""
        most = min(2 * self.rows + 1, self.side)
        return {
            "CIN": self.inputs, "COUT": self.outputs, "SIDE": self.side, "IMAGES": self.images, "ROWS": self.rows,
            "ENTRY_STRIP": self.strip,
            "ENTER_WARPS": _warps(self.images * most * self.side, self.outputs),
            "UNITS_WARPS": _warps(self.images * self.pooled**2, self.outputs),
            "LEAVE_WARPS": _warps(self.side**2, self.inputs),
        }  # fmt: skip

    def threads(self) -> dict[str, int]:
        """Of a block of each kernel."""
        sizes, across = self.sizes, 32 * max(1, self.outputs // 32)
        enter, units = sizes["ENTER_WARPS"] * across, sizes["UNITS_WARPS"] * across
        found = {"enter": enter, "glance": enter, "climb": units, "descend": units}
        found |= {"leave": sizes["LEAVE_WARPS"] * 32 * max(1, self.inputs // 32)}
        return found | {"weigh_entry": 32 * TAPS, "weigh_units": 32 * TAPS}

    def shared(self) -> dict[str, int]:
        """Bytes of shared memory of each kernel."""
        entry, units = self.outputs * (2 * self.flat + 16), self.outputs * (2 * TAPS * self.outputs + 16)
        most, pitch = min(2 * self.rows + 1, self.side), 2 * self.outputs + 16
        stream = self.images * _plane(self.pooled, self.outputs)
        own = _plane(self.side, self.inputs)
        enter = self.images * (own + most * self.side * pitch) + entry
        found = {
            "enter": enter,
            "glance": enter,
            "climb": 2 * stream + units,
            "descend": 2 * stream + units,
            "weigh_entry": _weighed(self.side, self.strip, self.inputs, self.outputs),
            "weigh_units": _weighed(self.pooled, self.pooled, self.outputs, self.outputs),
        }
        return found | ({"leave": _plane(self.side, self.outputs) + entry} if self.inputs >= 16 else {})


def _warps(pixels: int, channels: int) -> int:
    """How many warps share so many pixels, 16 at a time and at most 80 each, so that the fewest are idle."""
    tiles, most = -(-pixels // 16), 8 if channels <= 32 else 5
    choices = [n for n in range(1, most + 1) if -(-tiles // n) <= 5]
    return min(choices, key=lambda n: (-(-tiles // n) * n, -n), default=most)


def _weighed(side: int, strip: int, inputs: int, outputs: int) -> int:
    """Bytes that `weigh` needs: for an image and a strip of rows of a gradient, for what its warps pass on, or for the
    zeros that it meets past the end of a small image."""
    pitch, gap, row = _pitch(inputs), _gap(inputs), _row(side, inputs)
    slice_, top = min(SLICE, outputs), (side - 1) // strip * strip
    passed = (TAPS * inputs + 24) * slice_ if slice_ * inputs <= 512 else 0
    last = -(-(side - top) * side // 16) * 16 - 1
    reach = gap + (top + last // side + 2) * row + (last % side + 2) * pitch
    return max(_plane(side, inputs) + (strip * side + 1) * (2 * slice_ + 16), 4 * passed, reach)


def _pitch(channels: int) -> int:
    """Bytes from a pixel to the next, as `Plane` in `stage.cu` has it; so are the following."""
    return 16 if channels == 8 else 2 * channels + 16


def _gap(channels: int) -> int:
    return -(-_pitch(channels) // 128) * 128


def _row(side: int, channels: int) -> int:
    return side * _pitch(channels) + _gap(channels)


def _plane(side: int, channels: int) -> int:
    """Of one image with zeros around it."""
    return _gap(channels) + (side + 2) * _row(side, channels)


def fits(forms: list[Form], device: torch.device) -> bool:
    """Whether this device can do stages of these forms."""
    if device.type != "cuda" or not all(form.possible for form in forms) or not available():
        return False
    card = torch.cuda.get_device_properties(device)
    most = getattr(card, "shared_memory_per_block_optin", 0)
    return card.major >= 9 and all(size <= most for form in forms for size in form.shared().values())


def pictures(x: Sequence[Float[Tensor, "n c s s"]]) -> BFloat16[Tensor, "k n s s i"]:
    """Pictures for as many networks, as `stage` wants them: channels last, and filled up to eights."""
    found = torch.stack(list(x)).movedim(2, 4)
    return F.pad(found, (0, -found.shape[4] % 8)).bfloat16().contiguous()


def stage(
    x: BFloat16[Tensor, "k n s s i"],
    entry: Float[Tensor, "k o _ 3 3"],
    entry_bias: Float[Tensor, "k o"],
    units: Float[Tensor, "k 4 o o 3 3"],
    units_bias: Float[Tensor, "k 4 o"],
) -> BFloat16[Tensor, "k n p p o"]:
    """What `k` stages make of their own `n` images each: h = pool(W∗x), then twice h + W₂∗relu(W₁∗relu(h))."""
    filled = F.pad(entry, (0, 0, 0, 0, 0, x.shape[4] - entry.shape[2])).movedim(2, 4).flatten(2)
    own, inner = F.pad(filled, (0, -TAPS * x.shape[4] % 16)).contiguous(), units.movedim(3, 5).flatten(3).contiguous()
    low = own.detach().bfloat16(), inner.detach().bfloat16()
    biases = entry_bias.float().contiguous(), units_bias.float().contiguous()
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x, entry, entry_bias, units, units_bias))
    return _forward(x, own, biases[0], inner, biases[1], *low, keep)[0]


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
    """The outcome, and for the way back: the pooled pictures, where their values came from, and what is between.

    Weights come twice, in bfloat16 to compute with, and in full precision, as which they get their gradients.
    """
    form, (sets, n) = _form(x, entry), x.shape[:2]
    out, pooled, codes, kept = _made(x, entry, entry_bias, units, units_bias, low_entry, low_units, keep)
    kernels, blocks = _kernels(form, x.device), (-(-n // form.images), sets, 1)
    if keep:
        kernels["enter"](blocks, x, low_entry, entry_bias, pooled, codes, n)
    else:
        kernels["glance"](blocks, x, low_entry, entry_bias, pooled, n)
    kernels["climb"](blocks, pooled, low_units, units_bias, out, kept if keep else None, n)
    return out, pooled, codes, kept


@_forward.register_fake
def _made(
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
    form, (sets, n) = _form(x, entry), x.shape[:2]
    shape = (sets, n, form.pooled, form.pooled, form.outputs)
    codes, kept = (shape, (3, *shape)) if keep else ((0,), (0,))
    return x.new_empty(shape), x.new_empty(shape), x.new_empty(codes, dtype=torch.uint8), x.new_empty(kept)


@torch.library.custom_op("onefold::stage_back", mutates_args=())
def _backward(
    grad: Tensor,
    x: Tensor,
    low_entry: Tensor,
    low_units: Tensor,
    pooled: Tensor,
    codes: Tensor,
    kept: Tensor,
    further: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, if `further`, of the entry [k, parts, O · 9 · I + O], biases last, and of the units [4 k, …].

    Their parts are still to be added up, which is left to whoever compiles what is around it.
    """
    form, (sets, n) = _form(x, low_entry), x.shape[:2]
    kernels, blocks = _kernels(form, x.device), (-(-n // form.images), sets, 1)
    grads, middle = grad.new_empty(3, *grad.shape), torch.empty_like(grad)
    kernels["descend"](blocks, pooled, kept, low_units, grad, grads, middle, n)
    down = torch.empty_like(x) if further else x.new_empty(0)
    if further:
        kernels["leave"]((n, sets, 1), middle, codes, low_entry, down, n)
    entry = _parts(form.outputs, form.inputs, sets, n, grad)
    slices = max(1, form.outputs // SLICE)
    kernels["weigh_entry"]((entry.shape[1], sets, slices), x, middle, codes, entry, n)
    units = _parts(form.outputs, form.outputs, 4 * sets, n, grad)
    kernels["weigh_units"]((units.shape[1], sets, 4 * slices), pooled, kept, grad, grads, units, n)
    return down, entry, units


def _parts(outputs: int, inputs: int, jobs: int, n: int, like: Tensor) -> Tensor:
    """Room for sums of gradients, as many for each convolution as there are blocks that work on it."""
    size = outputs * TAPS * inputs + outputs
    blocks = BLOCKS // (jobs * max(1, outputs // SLICE))
    parts = max(1, min(n, blocks, PARTIAL // (4 * size * jobs)))
    return like.new_empty(jobs, parts, size, dtype=torch.float32)


@_backward.register_fake
def _found(
    grad: Tensor,
    x: Tensor,
    low_entry: Tensor,
    low_units: Tensor,
    pooled: Tensor,
    codes: Tensor,
    kept: Tensor,
    further: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    del low_units, pooled, codes, kept
    form, (sets, n) = _form(x, low_entry), x.shape[:2]
    entry = _parts(form.outputs, form.inputs, sets, n, grad)
    units = _parts(form.outputs, form.outputs, 4 * sets, n, grad)
    return torch.empty_like(x) if further else x.new_empty(0), entry, units


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, *_, low_entry, low_units, _ = inputs
    ctx.save_for_backward(x, low_entry, low_units, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
    del others
    x, low_entry, low_units, *rest = ctx.saved_tensors
    further, (sets, outputs, flat), inputs = ctx.needs_input_grad[0], low_entry.shape, x.shape[4]
    down, entry, units = _backward(grad.contiguous(), x, low_entry, low_units, *rest, further)
    own, bias = entry.sum(1).split([outputs * TAPS * inputs, outputs], -1)
    inner, inner_bias = units.sum(1).view(sets, 4, -1).split([outputs * TAPS * outputs, outputs], -1)
    own = F.pad(own.reshape(sets, outputs, -1), (0, flat - TAPS * inputs))
    inner = inner.reshape(low_units.shape)
    return down if further else None, own, bias.contiguous(), inner, inner_bias.contiguous(), None, None, None


_forward.register_autograd(_gradients, setup_context=_setup)


def _form(x: Tensor, entry: Tensor) -> Form:
    return Form(inputs=x.shape[4], outputs=entry.shape[1], side=x.shape[2])


@functools.cache
def _kernels(form: Form, device: torch.device) -> dict[str, Kernel]:
    with torch.cuda.device(device):
        source = resources.files("onefold.rl.fused").joinpath("stage.cu").read_text()
        compiled = module(source, form.sizes, torch.cuda.get_device_capability(device))
        return {name: Kernel(compiled, name, form.threads()[name], size) for name, size in form.shared().items()}
