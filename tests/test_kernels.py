"""Kernels against golden files, autograd, each other, and their limits; models come back as they were."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator, Tensor, nn

from onefold.errors import InputError, LayerError, NotEnoughMemoryError
from onefold.kernels import empirical_ntk, from_model, infinite, last_layer, logits
from onefold.nn.nets import MLP, NTKMLP, backbone

GOLDEN = json.loads((Path(__file__).parent / "golden" / "ntk.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: f"{c['activation']}-{c['hidden_layers']}-{c['w_std']}")
def test_infinite_agrees_with_neural_tangents(case: dict) -> None:
    x1, x2 = (torch.tensor(GOLDEN[name], dtype=torch.float64) for name in ("x1", "x2"))
    settings = {key: case[key] for key in ("activation", "w_std", "b_std")}
    both = infinite(case["hidden_layers"], **settings).both(x1, x2)
    for name in ("nngp", "ntk"):
        torch.testing.assert_close(getattr(both, name), torch.tensor(case[name]).double(), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("activation", ["relu", "erf"])
def test_infinite_diagonal_is_the_matrix_diagonal(activation, generator: Generator) -> None:
    x = torch.randn(7, 3, generator=generator)
    kernel = infinite(3, activation=activation, w_std=1.3, b_std=0.2)
    torch.testing.assert_close(kernel.diag(x), kernel(x, x).diagonal(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("activation", ["relu", "erf"])
def test_wide_networks_converge_to_the_closed_form_at_the_rate_of_the_square_root(activation) -> None:
    """Mean error over 16 draws at widths 64 and 1024: a factor of 4 is expected, 2.5 to 6.5 allowed for sampling."""
    generator = Generator().manual_seed(1)
    x = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    exact = infinite(2, activation=activation, w_std=1.4, b_std=0.3)(x, x)

    def error(width: int) -> float:
        errors = []
        for _ in range(16):
            net = NTKMLP(
                3, [width, width], activation=activation, w_std=1.4, b_std=0.3, generator=generator, dtype=torch.float64
            )
            errors.append(torch.linalg.norm(empirical_ntk(net)(x, x) - exact) / torch.linalg.norm(exact))
        return float(torch.stack(errors).mean())

    narrow, wide = error(64), error(1024)
    assert wide < 0.12
    assert 2.5 < narrow / wide < 6.5, f"{narrow:.4f} at width 64, {wide:.4f} at 1024"


def numerical_jacobian(f: Callable[[Tensor], Tensor], theta: Tensor, step: float = 1e-6) -> Tensor:
    """Central differences, as an implementation that shares nothing with autograd."""
    columns = []
    for i in range(len(theta)):
        shift = torch.zeros_like(theta)
        shift[i] = step
        columns.append((f(theta + shift) - f(theta - shift)) / (2 * step))
    return torch.stack(columns, -1)


def test_empirical_ntk_is_the_inner_product_of_gradients(generator: Generator) -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x1, x2 = torch.randn(4, 2, generator=generator).double(), torch.randn(5, 2, generator=generator).double()
    theta = nn.utils.parameters_to_vector(net.parameters()).detach()

    def outputs(x: Tensor) -> Callable[[Tensor], Tensor]:
        def f(values: Tensor) -> Tensor:
            nn.utils.vector_to_parameters(values, net.parameters())
            return net(x).detach()

        return f

    j1, j2 = numerical_jacobian(outputs(x1), theta), numerical_jacobian(outputs(x2), theta)
    nn.utils.vector_to_parameters(theta, net.parameters())
    expected = torch.einsum("aip,bjp->abij", j1, j2)
    kernel = empirical_ntk(net)
    torch.testing.assert_close(kernel.full(x1, x2), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(kernel(x1, x2), expected.diagonal(dim1=2, dim2=3).mean(-1), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(kernel.diag(x1), kernel(x1, x1).diagonal())
    torch.testing.assert_close(kernel(x1, x1), kernel(x1, x1.clone()))  # one pass over the same samples, or two
    torch.testing.assert_close(kernel.full(x1, x1), kernel.full(x1, x1.clone()))


def test_parameter_subsets_add_up(generator: Generator) -> None:
    net = backbone((1, 6, 6), channels=(4,), hidden=(8,), outputs=3, generator=generator).double()
    x = torch.randn(5, 1, 6, 6, generator=generator).double()
    parts = [empirical_ntk(net, ["trunk.*"]).full(x, x), empirical_ntk(net, ["mlp.*"]).full(x, x)]
    torch.testing.assert_close(parts[0] + parts[1], empirical_ntk(net).full(x, x))


def test_last_layer_is_the_tangent_kernel_of_the_last_weights(generator: Generator) -> None:
    net = MLP(3, [16, 8], 1).double()
    x1, x2 = torch.randn(4, 3, generator=generator).double(), torch.randn(6, 3, generator=generator).double()
    kernel = last_layer(net)
    torch.testing.assert_close(kernel(x1, x2), empirical_ntk(net, ["head.weight"])(x1, x2))
    torch.testing.assert_close(last_layer(net, normalise=True).diag(x1), torch.ones(4).double())
    plain = nn.Sequential(*[m for layer in net.hidden for m in (layer, nn.ReLU())], net.head)
    torch.testing.assert_close(last_layer(plain)(x1, x2), kernel(x1, x2))


def test_ntk_network_features_carry_the_scale_of_the_last_layer(generator: Generator) -> None:
    net = NTKMLP(2, [32], activation="erf", w_std=1.5, b_std=0.4, generator=generator, dtype=torch.float64)
    x = torch.randn(5, 2, generator=generator).double()
    torch.testing.assert_close(last_layer(net)(x, x), empirical_ntk(net, ["weights.1"])(x, x))


@given(memory=st.integers(40_000, 200_000))
def test_blocks_do_not_change_the_kernel(memory: int) -> None:
    net = MLP(3, [20], 2)
    x1, x2 = torch.linspace(-1, 1, 33).reshape(11, 3), torch.linspace(0, 2, 21).reshape(7, 3)
    capped, free = empirical_ntk(net, memory=memory), empirical_ntk(net)
    pairs = (capped.full(x1, x2), free.full(x1, x2)), (capped.diag(x1), free.diag(x1))
    for one, other in pairs:  # gradients are in float32, which rounds differently in batches of another size
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_kernel_that_cannot_fit_is_refused_before_it_starts() -> None:
    net = nn.Linear(1000, 1000)
    calls = []
    net.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(NotEnoughMemoryError, match=r"1000 outputs and 1,001,000 parameters needs .* GiB.*params=") as e:
        empirical_ntk(net, memory=2**30)(torch.zeros(4, 1000), torch.zeros(4, 1000))
    assert isinstance(e.value, MemoryError)
    assert len(calls) == 1, "only the one sample that counts the outputs may run"


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(3, 4), nn.Embedding(5, 4), nn.Linear(4, 2)

    def forward(self, image: Tensor, code: Tensor) -> Tensor:
        return self.out(torch.tanh(self.a(image) + self.b(code)))


class OneDict(nn.Module):
    def __init__(self, inner: TwoInputs) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"logits": self.inner(batch["image"], batch["code"])}


def test_from_model_takes_several_inputs_and_dicts(generator: Generator) -> None:
    net = TwoInputs()
    image, code = torch.randn(6, 3, generator=generator), torch.randint(5, (6,), generator=generator)
    expected = torch.tanh(net.a(image) + net.b(code)).detach()
    for model, x in (
        (net, (image, code)),
        (net, {"code": code, "image": image}),
        (OneDict(net), {"image": image, "code": code}),
    ):
        torch.testing.assert_close(from_model(model, width=None).features(x), expected)
    torch.testing.assert_close(
        empirical_ntk(net)((image, code), (image, code)), empirical_ntk(net)((image, code), (image, code)).T
    )
    with pytest.raises(InputError, match=r"different lengths: \[5, 6\]"):
        from_model(net).features((image, code[:5]))


class Tail(nn.Module):
    """Arguments that have defaults, and any others."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 2)

    def forward(self, image: Tensor, scale: float = 1.0, **_: Tensor) -> Tensor:
        return self.out(image * scale)


def test_samples_with_other_keys_than_the_model_takes_are_refused_by_name(generator: Generator) -> None:
    image, code, label = (
        torch.randn(6, 3, generator=generator),
        torch.randint(5, (6,), generator=generator),
        torch.zeros(6),
    )
    one, two, free = nn.Sequential(nn.Linear(3, 2)), TwoInputs(), ({0: torch.export.Dim("batch")},)
    program = torch.export.export(one.eval(), (image,), dynamic_shapes=free)
    for make, x, message in (
        (one, {"input": image, "label": label}, "Sequential.forward: takes no 'label', the samples have the keys"),
        (one, {"image": image, "label": label}, "If 'input' is to be a tensor, give it the key 'input', and leave out"),
        (two, {"image": image, "codes": code}, "TwoInputs.forward: takes no 'codes' and needs 'code', the samples"),
        (two, {"image": image}, "TwoInputs.forward: needs 'code', the samples have the keys 'image'. Give"),
        (program, {"input": image, "label": label}, "the exported model: takes no 'label', the samples have"),
    ):
        for kernel in (from_model, logits):
            with pytest.raises(InputError, match=re.escape(message)) as caught:
                kernel(make).features(x)
            assert "\n" not in str(caught.value)
    expected = one[0](image).detach()
    torch.testing.assert_close(logits(program).features({"input": image}), expected)
    tail = Tail()
    torch.testing.assert_close(logits(tail).features({"image": image, "label": label}), tail(image).detach())


def test_exported_models_are_given_named_samples_by_name(generator: Generator) -> None:
    net, batch = TwoInputs().eval(), torch.export.Dim("batch")
    image, code = torch.randn(6, 3, generator=generator), torch.randint(5, (6,), generator=generator)
    program = torch.export.export(net, (image, code), dynamic_shapes=({0: batch}, {0: batch}))
    expected = net(image, code).detach()
    for x in ({"image": image, "code": code}, {"code": code, "image": image}, (image, code)):
        torch.testing.assert_close(logits(program).features(x), expected)


def photograph(net: nn.Module) -> tuple:
    """All that a borrower could change about a model."""
    tensors = [*net.named_parameters(), *net.named_buffers()]
    return (
        {name: (t.clone(), t.data_ptr(), t.device, t.requires_grad) for name, t in tensors},
        [(name, m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in net.named_modules()],
    )


def test_the_model_comes_back_as_it_was(generator: Generator) -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(64, 3))
    net.train()
    net[2].eval()  # a mixture of modes must survive too
    before, state = photograph(net), torch.get_rng_state()
    x = torch.randn(5, 1, 6, 6, generator=generator)
    first = from_model(net, "1", width=50).features(x)
    torch.testing.assert_close(from_model(net, "1", width=50).features(x), first)
    last_layer(net).features(x)
    empirical_ntk(net, ["4.weight"])(x, x)
    with pytest.raises(RuntimeError):
        from_model(net).features(torch.zeros(2, 3, 6, 6))
    after = photograph(net)
    assert before[1] == after[1]
    for name, (value, *rest) in before[0].items():
        assert torch.equal(value, after[0][name][0])
        assert rest == list(after[0][name][1:])
        assert net.get_parameter(name).grad is None if name in dict(net.named_parameters()) else True
    assert torch.equal(torch.get_rng_state(), state), "the global random state belongs to the user"


def test_a_wide_projection_tends_to_the_arc_cosine_kernel(generator: Generator) -> None:
    """√(2/m) relu(zR) with R ~ N(0, 1/D) has the kernel 2 E[relu(u) relu(v)], the NNGP of one hidden relu layer."""
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    x = torch.randn(6, 3, generator=generator)
    z = from_model(net, width=None).features(x)
    from onefold.kernels import InfiniteMLP

    limit = 2 * InfiniteMLP(1, "relu", 1.0, 0.0, "nngp")(z, z)
    wide = from_model(net, width=2**17)(x, x).double()
    torch.testing.assert_close(wide, limit, rtol=0.05, atol=0.01)


def test_missing_layers_are_named() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    with pytest.raises(LayerError, match=r"Sequential has no layer 'encoder': did you mean '0', '1'\?"):
        from_model(net, "encoder")
    with pytest.raises(LayerError, match=r"no nn.Linear"):
        last_layer(nn.Conv2d(1, 2, 3))
    with pytest.raises(LayerError, match=r"no parameter of Linear is called 'scale'; it has weight, bias"):
        empirical_ntk(nn.Linear(2, 2), ["scale"])
    with pytest.raises(LayerError, match="no parameters"):
        empirical_ntk(nn.ReLU())
    unused = nn.Sequential(nn.Linear(3, 4))
    unused.spare = nn.Linear(4, 4)
    unused.forward = lambda x: unused[0](x)  # type: ignore[method-assign]
    with pytest.raises(LayerError, match="gave no tensor"):
        from_model(unused, "spare").features(torch.zeros(2, 3))


def test_features_do_not_depend_on_how_many_samples_go_in(generator: Generator) -> None:
    kernel = last_layer(MLP(3, [16], 1))
    x = torch.randn(2500, 3, generator=generator)
    np.testing.assert_allclose(kernel.features(x)[1200:1210], kernel.features(x[1200:1210]), rtol=1e-5, atol=1e-6)
    assert math.isclose(float(kernel.diag(x)[7]), float(kernel(x[7:8], x[7:8])), rel_tol=1e-5)
