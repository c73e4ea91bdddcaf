"""Fused stages against the same in plain torch: on a GPU, and without one by emulating its threads in C++."""

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

from onefold.nn.nets import Impala, backbone, trunks
from onefold.rl.fused import Form, fits, forms, fuse, stage, stages
from onefold.rl.fused.compile import available
from onefold.rl.networks import Trunk

HERE = Path(__file__).parent
SOURCE = HERE.parent / "src" / "onefold" / "rl" / "fused" / "stage.cu"
POINTERS = {"enter": 5, "glance": 4, "climb": 5, "descend": 6, "leave": 4, "weigh_entry": 4, "weigh_units": 5}


def rounded(x: Tensor) -> Tensor:
    """To bfloat16's three digits, and its gradient, too."""
    return x.bfloat16().to(x.dtype)


def plain(x: Tensor, entry: Tensor, entry_bias: Tensor, units: Tensor, units_bias: Tensor) -> Tensor:
    """A stage of each set, by torch's own functions in float64, rounded where the networks' own layers are."""

    def convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return rounded(F.conv2d(x, weight, bias, padding=1))

    found = []
    for k in range(len(x)):
        h = F.max_pool2d(convolved(x[k].permute(0, 3, 1, 2), entry[k], entry_bias[k]), 3, stride=2, padding=1)
        for first in (0, 2):
            inner = convolved(F.relu(h), units[k, first], units_bias[k, first])
            h = rounded(h + convolved(F.relu(inner), units[k, first + 1], units_bias[k, first + 1]))
        found.append(h.permute(0, 2, 3, 1))
    return torch.stack(found)


def invented(form: Form, sets: int, n: int, device: str) -> list[Tensor]:
    generator = Generator().manual_seed(form.side)

    def normal(*shape: int, scale: float) -> Tensor:
        drawn = scale * torch.randn(*shape, generator=generator)
        return drawn.bfloat16().float().to(device)  # so that both start from the same numbers

    return [
        normal(sets, n, form.side, form.side, form.inputs, scale=1.0),
        normal(sets, form.outputs, form.inputs, 3, 3, scale=(9 * form.inputs) ** -0.5),
        normal(sets, form.outputs, scale=0.3),
        normal(sets, 4, form.outputs, form.outputs, 3, 3, scale=(9 * form.outputs) ** -0.5),
        normal(sets, 4, form.outputs, scale=0.3),
    ]


def compared(form: Form, sets: int, n: int, device: str) -> None:
    given = [t.requires_grad_(i > 0 or form.inputs >= 16) for i, t in enumerate(invented(form, sets, n, device))]
    expected = plain(*(t.double() for t in given))
    weights = torch.randn(expected.shape, generator=Generator().manual_seed(1)).to(device)
    own = [t.detach().clone().requires_grad_(t.requires_grad) for t in given]
    found = stage(own[0].bfloat16(), *own[1:])
    assert found.shape == expected.shape
    assert _off(found, expected) < 0.003
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    names = ("x", "entry", "entry's bias", "units", "units' bias")
    for name, one, other in zip(names, own, given, strict=True):
        if other.grad is not None:
            assert one.grad is not None, name
            assert _off(one.grad, other.grad) < 0.01, (name, _off(one.grad, other.grad))
    with torch.no_grad():
        assert torch.equal(stage(own[0].bfloat16(), *own[1:]), found)


def _off(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels that run on a CPU."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ on this machine")

    def built(form: Form, device: torch.device) -> dict[str, Any]:
        del device
        lines = [f'#include "{HERE / "emulated_gpu.hpp"}"', f'#include "{SOURCE}"']
        for name in form.shared():
            count = POINTERS[name]
            call = f"{name}({', '.join(f'Pointer{{a{i}}}' for i in range(count))}, n)"
            taken = ", ".join(f"void *a{i}" for i in range(count))
            lines.append(
                f'extern "C" int run_{name}(int x, int y, int z, int threads, int bytes, {taken}, int n) '
                f"{{ return emulated::launch({{x, y, z}}, threads, bytes, [&] {{ {call}; }}); }}"
            )
        path = tmp_path / "_".join(map(str, form.sizes.values()))
        path.with_suffix(".cpp").write_text("\n".join(lines))
        sizes = [f"-D{name}={value}" for name, value in form.sizes.items()]
        command = [compiler, "-std=c++17", "-O2", "-w", "-shared", "-fPIC", *sizes, f"{path}.cpp", "-o", f"{path}.so"]
        subprocess.run(command, check=True)
        library = ctypes.CDLL(f"{path}.so")

        def launcher(name: str, bytes_: int) -> Any:
            def run(grid: tuple[int, int, int], *arguments: Tensor | int | None) -> None:
                tensors = [a for a in arguments if isinstance(a, Tensor)]
                assert all(t.is_contiguous() for t in tensors)
                *pointers, n = arguments
                values = [ctypes.c_void_p(a.data_ptr() if isinstance(a, Tensor) else None) for a in pointers]
                outside = getattr(library, f"run_{name}")(*grid, form.threads()[name], bytes_, *values, n)
                assert outside == 0, f"{name} reads past its shared memory"

            return run

        return {name: launcher(name, size) for name, size in form.shared().items()}

    monkeypatch.setattr(stages, "_kernels", functools.cache(built))
    monkeypatch.setattr(stages, "BLOCKS", 4)  # so few that a block goes through several images


# Of agents' networks and of their bonuses'; others that are possible.
FORMS = [Form(8, 32, 42), Form(32, 32, 21), Form(32, 64, 11), Form(8, 16, 42), Form(16, 16, 21), Form(16, 32, 11)]
OTHERS = [Form(8, 16, 27), Form(64, 32, 7), Form(16, 64, 14), Form(8, 16, 12), Form(16, 16, 6), Form(16, 32, 3)]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("form", FORMS + OTHERS, ids=str)
def test_emulated_stages(form: Form) -> None:
    compared(form, sets=1 if form.side > 21 else 2, n=3 if form.side < 21 else 1, device="cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("form", FORMS + OTHERS, ids=str)
def test_stages_on_a_gpu(form: Form) -> None:
    assert fits([form], torch.device("cuda"))
    for sets, n in ((1, 256), (3, 16), (2, 3)):
        compared(form, sets, n, "cuda")


@pytest.mark.usefixtures("emulated")
def test_networks_are_the_same_fused(generator: Generator) -> None:
    shape, channels = (3, 12, 12), (16, 16)
    x = [torch.rand(3, *shape, generator=generator) for _ in range(2)]
    trunk = Trunk(shape, channels, generator)
    nets = [backbone(shape, channels=channels, hidden=(8,), outputs=4, generator=generator) for _ in range(2)]
    assert all(isinstance(net, Impala) for net in nets)

    def outcomes() -> list[Tensor]:
        found = [trunk(x[0]), *trunks(nets, x), nets[0](x[0])]  # pyright: ignore[reportArgumentType]
        parameters = [p for module in (trunk, *nets) for p in module.parameters() if p.requires_grad]
        weighted = sum((z.float() * torch.linspace(-1, 1, z.numel()).view_as(z)).sum() for z in found)
        grads = torch.autograd.grad(weighted, parameters, allow_unused=True)  # pyright: ignore[reportCallIssue, reportArgumentType]
        return [z.detach().float() for z in found] + list(grads)

    expected, passes = outcomes(), 4
    for part in (trunk, *nets):
        part.fused = True  # pyright: ignore[reportArgumentType]
    for i, (one, other) in enumerate(zip(outcomes(), expected, strict=True)):
        assert (one is None) == (other is None)
        # Rounded, a value near zero or near its neighbour sends its gradient elsewhere; three images hold few pixels.
        assert one is None or _off(one, other) < (0.02 if i < passes else 0.25), (one.shape, _off(one, other))


def test_where_stages_are_not_fused() -> None:
    assert not fits([Form(8, 32, 42)], torch.device("cpu"))
    assert not Form(8, 8, 42).possible
    assert available() == torch.cuda.is_available()
    assert not Form(8, 32, 65).possible
    assert not any(form.possible for form in forms((3, 42, 40), (32, 32)))
    net = backbone((3, 12, 12), channels=(16,), hidden=(8,), outputs=4, generator=Generator())
    fuse(net, torch.device("cpu"))
    assert net.fused is False
