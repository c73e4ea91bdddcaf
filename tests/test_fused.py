"""Fused stages against the same computation in plain torch: on a GPU, and emulated in C++ without one."""

import ctypes
import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from torch.nn import functional as F  # noqa: N812

from onefold.nn import nets
from onefold.nn.nets import Impala, backbone, fuse, trunks
from onefold.rl.fused import stages
from onefold.rl.fused.nvrtc import available
from onefold.rl.fused.stages import StageShape, are_supported, stage, stage_shapes
from onefold.rl.networks import Trunk

HERE = Path(__file__).parent
SOURCE = HERE.parent / "src" / "onefold" / "rl" / "fused" / "stage.cu"
POINTERS = {
    "entry_forward": 5, "entry_inference": 4, "units_forward": 5, "units_backward": 6, "entry_backward": 4,
    "entry_weight_gradient": 4, "units_weight_gradient": 5,
}  # fmt: skip


def round_to_bfloat16(x: Tensor) -> Tensor:
    """Round to bfloat16; the gradient is rounded as well."""
    return x.bfloat16().to(x.dtype)


def reference_stage(x: Tensor, entry: Tensor, entry_bias: Tensor, units: Tensor, units_bias: Tensor) -> Tensor:
    """Compute a stage of each set by torch's functions in float64, rounded where the layers of the networks round."""

    def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return round_to_bfloat16(F.conv2d(x, weight, bias, padding=1))

    outputs = []
    for k in range(len(x)):
        h = F.max_pool2d(convolve(x[k].permute(0, 3, 1, 2), entry[k], entry_bias[k]), 3, stride=2, padding=1)
        for first in (0, 2):
            inner = convolve(F.relu(h), units[k, first], units_bias[k, first])
            h = round_to_bfloat16(h + convolve(F.relu(inner), units[k, first + 1], units_bias[k, first + 1]))
        outputs.append(h.permute(0, 2, 3, 1))
    return torch.stack(outputs)


def random_inputs(shape: StageShape, sets: int, n: int, device: str) -> list[Tensor]:
    generator = Generator().manual_seed(shape.side)

    def normal(*shape: int, scale: float) -> Tensor:
        drawn = scale * torch.randn(*shape, generator=generator)
        return drawn.bfloat16().float().to(device)  # so that both start from the same numbers

    return [
        normal(sets, n, shape.side, shape.side, shape.inputs, scale=1.0),
        normal(sets, shape.outputs, shape.inputs, 3, 3, scale=(9 * shape.inputs) ** -0.5),
        normal(sets, shape.outputs, scale=0.3),
        normal(sets, 4, shape.outputs, shape.outputs, 3, 3, scale=(9 * shape.outputs) ** -0.5),
        normal(sets, 4, shape.outputs, scale=0.3),
    ]


def compare(shape: StageShape, sets: int, n: int, device: str) -> None:
    reference_tensors = [
        t.requires_grad_(i > 0 or shape.inputs >= 16) for i, t in enumerate(random_inputs(shape, sets, n, device))
    ]
    expected = reference_stage(*(t.double() for t in reference_tensors))
    weights = torch.randn(expected.shape, generator=Generator().manual_seed(1)).to(device)
    tensors = [t.detach().clone().requires_grad_(t.requires_grad) for t in reference_tensors]
    result = stage(tensors[0].bfloat16(), *tensors[1:])
    assert result.shape == expected.shape
    assert relative_error(result, expected) < 0.003
    (expected * weights).sum().backward()
    (result * weights).sum().backward()
    names = ("x", "entry", "entry_bias", "units", "units_bias")
    for name, one, other in zip(names, tensors, reference_tensors, strict=True):
        if other.grad is not None:
            assert one.grad is not None, name
            assert relative_error(one.grad, other.grad) < 0.01, (name, relative_error(one.grad, other.grad))
    with torch.no_grad():
        assert torch.equal(stage(tensors[0].bfloat16(), *tensors[1:]), result)


def relative_error(result: Tensor, expected: Tensor) -> float:
    result, expected = result.detach().double(), expected.detach().double()
    return float((result - expected).norm() / expected.norm())


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Replace the kernels by emulated ones on the CPU."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ on this machine")

    def build(shape: StageShape, device: torch.device) -> dict[str, Any]:
        del device
        lines = [f'#include "{HERE / "emulated_gpu.hpp"}"', f'#include "{SOURCE}"']
        for name in shape.shared_memory():
            count = POINTERS[name]
            call = f"{name}({', '.join(f'Pointer{{a{i}}}' for i in range(count))}, n)"
            taken = ", ".join(f"void *a{i}" for i in range(count))
            lines.append(
                f'extern "C" int run_{name}(int x, int y, int z, int threads, int bytes, {taken}, int n) '
                f"{{ return emulated::launch({{x, y, z}}, threads, bytes, [&] {{ {call}; }}); }}"
            )
        path = tmp_path / "_".join(map(str, shape.macros.values()))
        path.with_suffix(".cpp").write_text("\n".join(lines))
        sizes = [f"-D{name}={value}" for name, value in shape.macros.items()]
        command = [compiler, "-std=c++17", "-O0", "-w", "-shared", "-fPIC", *sizes, f"{path}.cpp", "-o", f"{path}.so"]
        subprocess.run(command, check=True)
        library = ctypes.CDLL(f"{path}.so")

        def launcher(name: str, bytes_: int) -> Any:
            def run(grid: tuple[int, int, int], *arguments: Tensor | int | None) -> None:
                tensors = [a for a in arguments if isinstance(a, Tensor)]
                assert all(t.is_contiguous() for t in tensors)
                *pointers, n = arguments
                values = [ctypes.c_void_p(a.data_ptr() if isinstance(a, Tensor) else None) for a in pointers]
                outside = getattr(library, f"run_{name}")(*grid, shape.threads_per_block()[name], bytes_, *values, n)
                assert outside == 0, f"{name} reads past its shared memory"

            return run

        return {name: launcher(name, size) for name, size in shape.shared_memory().items()}

    monkeypatch.setattr(stages, "_kernels", functools.cache(build))
    monkeypatch.setattr(stages, "BLOCKS", 4)  # so few that a block processes several images


# Stages of the agents' networks and bonus networks, and other supported shapes.
SHAPES = [
    StageShape(8, 32, 42),
    StageShape(32, 32, 21),
    StageShape(32, 64, 11),
    StageShape(8, 16, 42),
    StageShape(16, 16, 21),
    StageShape(16, 32, 11),
]
OTHERS = [
    StageShape(8, 16, 27),
    StageShape(64, 32, 7),
    StageShape(16, 64, 14),
    StageShape(8, 16, 12),
    StageShape(16, 16, 6),
    StageShape(16, 32, 3),
]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("shape", SHAPES + OTHERS, ids=str)
def test_emulated_stages(shape: StageShape) -> None:
    compare(shape, sets=1 if shape.side > 21 else 2, n=3 if shape.side < 21 else 1, device="cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("shape", SHAPES + OTHERS, ids=str)
def test_stages_on_a_gpu(shape: StageShape) -> None:
    assert are_supported([shape], torch.device("cuda"))
    for sets, n in ((1, 256), (3, 16), (2, 3)):
        compare(shape, sets, n, "cuda")


@pytest.mark.usefixtures("emulated")
def test_fused_networks_equal_plain_ones(generator: Generator) -> None:
    shape, channels = (3, 12, 12), (16, 16)
    x = [torch.rand(3, *shape, generator=generator) for _ in range(2)]
    trunk = Trunk(shape, channels, generator)
    networks = [backbone(shape, channels=channels, hidden=(8,), outputs=4, generator=generator) for _ in range(2)]
    assert all(isinstance(net, Impala) for net in networks)

    def outputs_and_gradients() -> list[Tensor]:
        outputs = [trunk(x[0]), *trunks(networks, x), networks[0](x[0])]  # pyright: ignore[reportArgumentType]
        parameters = [p for module in (trunk, *networks) for p in module.parameters() if p.requires_grad]
        weighted = sum((z.float() * torch.linspace(-1, 1, z.numel()).view_as(z)).sum() for z in outputs)
        grads = torch.autograd.grad(weighted, parameters, allow_unused=True)  # pyright: ignore[reportCallIssue, reportArgumentType]
        return [z.detach().float() for z in outputs] + list(grads)

    expected, passes = outputs_and_gradients(), 4
    for part in (trunk, *networks):
        part.fused = True  # pyright: ignore[reportArgumentType]
    for i, (one, other) in enumerate(zip(outputs_and_gradients(), expected, strict=True)):
        assert (one is None) == (other is None)
        # Rounding a value near zero or near another maximum moves its gradient; three images have few pixels.
        assert one is None or relative_error(one, other) < (0.02 if i < passes else 0.25), (
            one.shape,
            relative_error(one, other),
        )


def test_unsupported_stages_are_not_fused() -> None:
    assert not are_supported([StageShape(8, 32, 42)], torch.device("cpu"))
    assert not StageShape(8, 8, 42).is_supported
    assert available() == torch.cuda.is_available()
    assert not StageShape(8, 32, 65).is_supported
    assert not any(shape.is_supported for shape in stage_shapes((3, 42, 40), (32, 32)))
    net = backbone((3, 12, 12), channels=(16,), hidden=(8,), outputs=4, generator=Generator())
    fuse(net, torch.device("cpu"))
    assert net.fused is False


def test_the_kernels_are_registered_by_one_import(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nets.fused_stages is stages
    net = backbone((3, 12, 12), channels=(16,), hidden=(8,), outputs=4, generator=Generator())
    monkeypatch.setattr(stages, "are_supported", lambda *_: True)
    fuse(net, torch.device("cpu"))
    assert net.fused is True
    monkeypatch.setattr(nets, "fused_stages", None)
    fuse(net, torch.device("cpu"))
    assert net.fused is False
