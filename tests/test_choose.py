"""Which detector is chosen, why, and that the choice needs no unfamiliar data."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from onefold import CSD, LastLayerGP, LocalGP, choose_detector, load
from onefold.detectors import choose
from onefold.errors import InputError, OnefoldWarning
from onefold.inputs import open_source
from onefold.kernels import from_model, logits
from onefold.nn.train import Recipe


class Head(nn.Module):
    """A classifier of vectors whose largest probability is near `sure`."""

    def __init__(self, sure: float, classes: int = 4) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(3, 5), nn.Linear(5, classes, bias=False)
        with torch.no_grad():
            self.hidden.weight.zero_()
            self.hidden.bias.fill_(1.0)
            self.head.weight.zero_()
            self.head.weight[0] = float(np.log(sure * (classes - 1) / (1 - sure))) / 5

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(x)))


class Encoder(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


def vectors(n: int, d: int = 3) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(n, d)).astype(np.float32)


def test_vectors_and_tables_get_the_closed_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(choose_detector(vectors(50)), LastLayerGP)
    assert capsys.readouterr().out.startswith("LastLayerGP: vectors; the closed form")
    (tmp_path / "t.csv").write_text("a,b\n" + "1,x\n2,y\n" * 30)
    detector = choose_detector(tmp_path / "t.csv", seed=3, device="cpu", show=False)
    assert isinstance(detector, LastLayerGP)
    assert (detector.seed, detector.width) == (3, 2048)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("sure", "role"), [(0.49, "encoder"), (0.51, "classifier"), (0.99, "classifier")])
def test_a_model_is_a_classifier_if_it_is_sure_of_the_data(sure: float, role: str) -> None:
    choice = choose.explain_choice(vectors(50), Head(sure), role=None, seed=0, device="cpu")
    assert f"mean largest probability {sure:.2f}" in choice.reason
    assert choice.reason.startswith(f"a{'n' * (role == 'encoder')} {role}")
    assert isinstance(choice.detector, LocalGP if role == "encoder" else CSD)
    if isinstance(choice.detector, CSD):
        assert (choice.detector.role, choice.detector.score_kind) == ("classifier", "surprisal")


def test_the_role_and_the_kernel_are_those_passed() -> None:
    assert isinstance(choose_detector(vectors(50), Head(0.99), role="encoder"), LocalGP)
    detector = choose_detector(vectors(50), Head(0.26), role="classifier")
    assert isinstance(detector, CSD)
    kernel = from_model(Head(0.9), "hidden")
    named = choose_detector(vectors(50), kernel)
    assert (named.kernel, named.score_kind) == (kernel, "combined")  # the score of a named layer has no role
    assert isinstance(choose_detector(vectors(50), Encoder()), LocalGP)
    with pytest.raises(InputError, match="role: a role belongs to a model"):
        choose_detector(vectors(50), role="encoder")


def test_many_rows_of_embeddings_go_to_the_closed_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(choose, "LARGEST_LOCAL", 60)
    assert isinstance(choose_detector(vectors(60), Encoder()), LocalGP)
    assert isinstance(choose_detector(vectors(61), Encoder()), LastLayerGP)
    (tmp_path / "t.csv").write_text("a,b,c\n" + "1,2,3\n" * 61)  # a table has no length before it is read
    assert isinstance(choose_detector(tmp_path / "t.csv", Encoder()), LastLayerGP)
    assert not isinstance(open_source(tmp_path / "t.csv"), choose.IndexedSource)


def test_confidence_is_measured_on_samples_from_all_of_the_data() -> None:
    """The first half of the rows looks unsure, the second sure; with 2,000 rows every second one is examined."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(1, 2, bias=False)
            with torch.no_grad():
                self.head.weight.copy_(torch.tensor([[0.0], [1.0]]))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)

    x = np.concatenate([np.zeros(1000), np.full(1000, 50)]).astype(np.float32)[:, None]
    choice = choose.explain_choice(x, Half(), role=None, seed=0, device="cpu")
    assert "probability 0.75" in choice.reason


@pytest.mark.parametrize(("shape", "count", "kind"), [((28, 28), 40, LastLayerGP), ((28, 28), 5000, CSD),
                                                      ((3, 40, 40), 5000, LastLayerGP)])  # fmt: skip
def test_images_without_a_model_get_a_warning_with_the_line_that_helps(shape: Any, count: int, kind: type) -> None:
    x = np.zeros((count, *shape), np.uint8)
    with pytest.warns(
        OnefoldWarning, match=r"without a model.*from_pretrained\(\"dinov2-small\"\).*from_pretrained\(\"path"
    ):
        assert isinstance(choose_detector(x), kind)


def test_a_small_detector_of_photos_fits_at_once_and_has_a_small_file(tmp_path: Path) -> None:
    photos = np.random.default_rng(0).integers(0, 256, (120, 3, 64, 64), dtype=np.uint8)
    with pytest.warns(OnefoldWarning, match="without a model"):
        detector = choose_detector(photos, device="cpu")
    assert (detector.width, detector.channels) == (512, (16, 16, 16))
    detector.fit(photos).save(tmp_path / "d.onefold")
    assert (tmp_path / "d.onefold").stat().st_size < 4e6 + photos.nbytes
    copy = load(tmp_path / "d.onefold", device="cpu")
    np.testing.assert_array_equal(copy.score(photos[:5]), detector.score(photos[:5]))


def test_outputs_as_a_kernel_are_logits() -> None:
    assert isinstance(choose_detector(vectors(50), logits(Head(0.9))), CSD)


def test_bad_input_is_refused_in_one_line() -> None:
    with pytest.raises(InputError, match="not a PyTorch model"):
        choose_detector(vectors(50), model="resnet")
    with pytest.raises(InputError, match="could be grey images or time series"):
        choose_detector(np.zeros((9, 4, 7), np.float32))
    with pytest.raises(InputError, match="seed"):
        choose_detector(vectors(9), seed=-1)


def test_a_pretrained_model_is_an_encoder_whatever_its_logits_say(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = from_model(Head(0.99))
    settings: Any = type(kernel).settings.fget
    monkeypatch.setattr(
        type(kernel), "settings", property(lambda self: {**settings(self), "pretrained": {"name": "x"}})
    )
    assert isinstance(choose_detector(vectors(50), kernel), LocalGP)
    csd = CSD(kernel, recipe=Recipe(steps=3, batch=8)).fit(vectors(50))
    assert csd.state.spec.classes is None  # pyright: ignore[reportAttributeAccessIssue]
