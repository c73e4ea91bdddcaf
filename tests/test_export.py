"""Exported files that take raw inputs: images of any size, columns of tables; p-values, parity and model cards."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image

import onefold
from onefold.cli import main
from onefold.cli.parity import compare
from onefold.decode import Picture, decode
from onefold.detectors.alarm import Alarm
from onefold.detectors.card import MARK, write_card
from onefold.detectors.raw_inputs import image_front
from onefold.errors import FileError, InputError
from onefold.inputs.reader import Reader
from onefold.serve import ExportedModel


def session(path: Path | bytes) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    source = path if isinstance(path, bytes) else str(path)
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def photo(rng: np.random.Generator, height: int, width: int) -> Image.Image:
    """Return a smooth colour image with an edge and some noise."""
    y, x = np.mgrid[:height, :width] / max(height, width)
    waves = [np.sin(rng.uniform(2, 30) * x + rng.uniform(2, 30) * y + rng.uniform(0, 6)) for _ in range(3)]
    pixels = 128 + 80 * np.stack(waves, -1) + 40 * (x > rng.uniform())[..., None] + rng.normal(0, 8, (height, width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def write_photos(folder: Path, count: int, seed: int) -> Path:
    """Write JPEG files of different sizes, some grey and some turned by EXIF data; every tenth is only noise."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    for i in range(count):
        height, width = (int(side) for side in np.exp(rng.uniform(np.log(20), np.log(500), 2)))
        image = photo(rng, height, width)
        if i % 10 == 0:
            image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        exif = Image.Exif()
        exif[0x0112] = i % 8 + 1
        (image.convert("L") if i % 7 == 0 else image).save(folder / f"{i:04}.jpg", quality=90, exif=exif)
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A detector of image files, and the folder of its training data."""
    folder = write_photos(tmp_path_factory.mktemp("photos") / "fit", 60, 0)
    held_out = write_photos(folder.parent / "held-out", 60, 1)
    detector = onefold.KNN(k=3).fit(str(folder)).calibrate(str(held_out), fpr=0.2)
    detector.save(folder.parent / "photos.onefold")
    return detector, folder.parent


# --- images -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("picture", [(3, 64, 64), (1, 30, 30), (3, 24, 40), (3, 50, 20)], ids=str)
def test_images_of_any_size_are_scaled_as_pillow_does(picture: tuple[int, int, int], tmp_path: Path) -> None:
    """Noise is the hardest image to scale; two grey levels are allowed."""
    channels, height, width = picture
    form = Picture(height, width, channels)
    front = image_front(Reader("images", {"x": picture}, {"x": "uint8"}, form=form))
    output = onnx.helper.make_tensor_value_info("onefold.x", onnx.TensorProto.UINT8, None)
    graph = onnx.helper.make_graph(front.nodes, "front", front.inputs, [output], front.constants)
    opset = onnx.helper.make_opsetid("", 18)
    model = session(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=9).SerializeToString())
    rng = np.random.default_rng(0)
    for size in [(64, 64), (300, 200), (201, 300), (17, 90), (1, 1), (3, 400), (640, 480), (height, width)]:
        pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "x.png")
        expected = decode(tmp_path / "x.png", form).astype(int)
        difference = np.abs(model.run(None, {"x": pixels})[0][0] - expected)
        assert difference.max() <= 2
        assert difference.mean() < 0.5


def test_the_crop_is_central_and_has_the_aspect_ratio() -> None:
    assert Picture(64, 64, 3).crop(100, 161) == (0, 30, 100, 100)
    assert Picture(30, 60, 3).crop(100, 100) == (25, 0, 50, 100)
    assert Picture(30, 60, 3).crop(100, 100)[2:] == (50, 100)
    assert Picture(4000, 1, 1).crop(3, 500) == (0, 249, 3, 1), "never less than one pixel"


def test_a_detector_of_image_files_takes_one_image_of_any_size(photos: Any) -> None:
    detector, folder = photos
    path = folder / "one.onnx"
    detector.export(path)
    model = session(path)
    assert [(part.name, part.type, part.shape) for part in model.get_inputs()] == [
        ("x", "tensor(uint8)", ["height", "width", 3])
    ]
    assert [(part.name, part.type, part.shape) for part in model.get_outputs()] == [
        ("score", "tensor(float)", [1]), ("pvalue", "tensor(double)", [1]), ("is_ood", "tensor(bool)", [1]),
    ]  # fmt: skip
    pixels = np.asarray(photo(np.random.default_rng(5), 90, 120))
    score, pvalue, is_ood = model.run(None, {"x": pixels})
    Image.fromarray(pixels).save(folder / "one.png")
    np.testing.assert_allclose(score, detector.score(str(folder / "one.png")), rtol=1e-3)
    np.testing.assert_allclose(pvalue, detector.alarm.pvalues(score.astype(float)), rtol=1e-12)
    assert not is_ood[0]
    metadata = json.loads(model.get_modelmeta().custom_metadata_map["onefold"])
    assert metadata["input"] == {"kind": "image", "height": 64, "width": 64, "channels": 3}


def test_the_threshold_is_an_optional_input(photos: Any) -> None:
    detector, folder = photos
    detector.export(folder / "t.onnx")
    model = session(folder / "t.onnx")
    assert [part.name for part in model.get_overridable_initializers()] == ["threshold"]
    feeds = {"x": np.asarray(photo(np.random.default_rng(5), 90, 120))}
    score = float(model.run(["score"], feeds)[0][0])
    for threshold, alarm in ((score, False), (np.nextafter(score, -np.inf), True), (np.inf, False), (-np.inf, True)):
        assert model.run(["is_ood"], {**feeds, "threshold": np.array(threshold)})[0] == [alarm]
    assert model.run(["is_ood"], feeds)[0] == [score > detector.threshold]


@pytest.mark.parametrize("layout", ["first", "last", "grey"])
def test_a_detector_of_arrays_takes_images_on_request(layout: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shape = {"first": (60, 3, 16, 12), "last": (60, 16, 12, 3), "grey": (60, 16, 12)}[layout]
    x = rng.integers(0, 256, shape, dtype=np.uint8)
    detector = onefold.KNN(k=3).fit(x[:40]).calibrate(x[40:], fpr=0.2)
    detector.export(tmp_path / "image.onnx", inputs="image")
    detector.export(tmp_path / "batch.onnx")
    for path in ("image.onnx", "batch.onnx"):
        np.save(tmp_path / "x.npy", x)
        parity = compare(detector, tmp_path / path, str(tmp_path / "x.npy"))
        assert parity.ok
        assert (parity.inputs, parity.different) == (60, 0)
        assert parity.largest < 1e-4


def test_inputs_that_a_model_cannot_take_are_refused(photos: Any, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 3))
    vectors = onefold.KNN(k=3).fit(x)
    with pytest.raises(InputError, match="inputs: the detector was not fitted on grey or colour images"):
        vectors.export(tmp_path / "d.onnx", inputs="image")
    with pytest.raises(InputError, match=r"inputs: a \.pt2 file takes batches"):
        photos[0].export(tmp_path / "d.pt2", inputs="image")
    assert list(tmp_path.iterdir()) == []


# --- p-values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [19, 31, 32, 33, 200])
def test_exported_pvalues_are_those_of_the_alarm(n: int) -> None:
    """The binary search of the graph equals NumPy's, at ties, between scores, beyond both ends, and for NaN."""
    from onefold.detectors.export import ExportedDetector

    rng = np.random.default_rng(n)
    calibration = rng.choice(rng.normal(size=n), n)  # with ties
    alarm = Alarm(calibration, 0.1)
    reader = Reader("vectors", {"x": (1,)}, {"x": "float32"})
    module = ExportedDetector(reader, torch.nn.Identity(), alarm)
    scores = np.concatenate([alarm.scores, alarm.pvalue_limits, rng.normal(size=50), [-1e9, 1e9, -np.inf, np.inf]])
    np.testing.assert_allclose(module.pvalues(torch.from_numpy(scores)).numpy(), alarm.pvalues(scores), rtol=1e-15)
    nan = module.pvalues(torch.tensor([np.nan], dtype=torch.float64))
    assert nan.item() == pytest.approx(alarm.u / (n + 1))


# --- tables -----------------------------------------------------------------------------------------------------------

NAMES = (
    "length",
    "score",
    "colour",
    "x",
    "pvalue",
    "val_3",
    "onefold.x",
)  # some names are those of values in the graph


def write_table(path: Path, rows: int, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(NAMES)
        for i in range(rows):
            numbers = [f"{value:.6g}" for value in rng.normal(size=6)]
            numbers[1] = "" if i % 9 == 0 else numbers[1]
            colour = "NA" if i % 11 == 0 else rng.choice(["red", " blue", "gr\u00fcn"])
            writer.writerow([*numbers[:2], colour, *numbers[2:]])
    return path


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("table")
    write_table(folder / "fit.csv", 300, 0)
    write_table(folder / "new.csv", 200, 1)
    detector = onefold.LastLayerGP(width=256).fit(str(folder / "fit.csv")).calibrate(str(folder / "new.csv"), fpr=0.2)
    detector.export(folder / "t.onnx")
    return detector, folder


def test_the_columns_of_a_table_are_inputs(table: Any) -> None:
    detector, folder = table
    names = {part.name: part.type for part in session(folder / "t.onnx").get_inputs()}
    assert names == {
        "length": "tensor(double)", "column 1: score": "tensor(double)", "colour": "tensor(string)",
        "x": "tensor(double)", "column 4: pvalue": "tensor(double)", "val_3": "tensor(double)",
        "column 6: onefold.x": "tensor(double)",
    }  # fmt: skip
    parity = compare(detector, folder / "t.onnx", str(folder / "new.csv"))
    assert (parity.inputs, parity.different) == (200, 0)
    assert parity.largest < 1e-4


def test_rows_of_json_score_as_rows_of_a_file(table: Any) -> None:
    detector, folder = table
    model = ExportedModel(folder / "t.onnx")
    with (folder / "new.csv").open(newline="") as file:
        rows = [
            {key: (value if key == "colour" else float(value) if value else None) for key, value in row.items()}
            for row in csv.DictReader(file)
        ]
    rows[0] = {**rows[0], "colour": None}
    rows[1] = {**rows[1], "colour": "unseen"}
    frame = (folder / "rows.csv").open("w", newline="")
    with frame:
        writer: Any = csv.DictWriter(frame, NAMES)
        writer.writeheader()
        writer.writerows(rows)
    results = model.score_rows(rows)
    np.testing.assert_allclose(results.score, detector.score(str(folder / "rows.csv")), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(results.is_ood, detector.is_ood(str(folder / "rows.csv")))
    assert results.score[1] > detector.threshold, "a new category"


def test_codes_of_a_table_are_a_batch(table: Any, tmp_path: Path) -> None:
    detector, folder = table
    for path in (tmp_path / "codes.onnx", tmp_path / "codes.pt2"):
        detector.export(path, inputs="batch")
        assert compare(detector, path, str(folder / "new.csv")).different == 0
    model = ExportedModel(tmp_path / "codes.onnx")
    assert model.layout["table"]["columns"][2]["categories"] == list(detector.reader.form.columns[2].categories)
    codes = [[0.1, None, -1, 0.3, 0.4, 0.5, 0.6]]
    expected = np.array(codes, float)
    np.testing.assert_array_equal(model.score_rows(codes).score, model.run({"x": expected}).score)


# --- the command ------------------------------------------------------------------------------------------------------


def test_check_compares_decisions_and_the_card_describes_the_file(photos: Any, capsys: Any, tmp_path: Path) -> None:
    detector, folder = photos
    held_out = folder / "held-out"
    assert main(["export", str(folder / "photos.onefold"), str(tmp_path / "p.onnx"), "--check", str(held_out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"Exported: {tmp_path / 'p.onnx'}"
    assert lines[1].startswith("Check: 60 of 60 decisions agree; scores differ by at most ")
    assert lines[2] == f"Model card: {tmp_path / 'README.md'}"
    card = (tmp_path / "README.md").read_text()
    front = card.split("---\n")[1]
    assert "library_name: onnx\ntags:\n- onefold\n" in front
    for line in (
        "60 samples: colour image files, cropped at the centre and scaled to 64 × 64 pixels",
        "| calibration samples | 60 |", "| false-alarm rate asked for | 0.2 |",
        f"| threshold | {detector.threshold:.6g} |",
        "no raw training samples. It holds the features of 60 training samples.", "60 of 60 decisions agree",
        f"onefold {onefold.__version__}, Python 3.", "- signal: ",
    ):  # fmt: skip
        assert line in card, line


def test_a_readme_of_the_user_is_kept(table: Any, capsys: Any, tmp_path: Path) -> None:
    detector, _ = table
    card = tmp_path / "README.md"
    card.write_text("my own words")
    assert not write_card(detector, tmp_path / "t.onnx", "Inputs.", [])
    assert card.read_text() == "my own words"
    detector.save(tmp_path / "t.onefold")
    assert main(["export", str(tmp_path / "t.onefold"), str(tmp_path / "t.pt2")]) == 0
    assert capsys.readouterr().out.splitlines()[1] == f"{card} is kept: onefold did not write it"
    card.unlink()
    assert write_card(detector, tmp_path / "t.onnx", "Inputs.", [])
    written = card.read_text()
    assert "Columns: `length`, `score`, `colour`" in written
    assert "the names of the columns and the categories in them" in written
    assert write_card(detector, tmp_path / "u.onnx", "Inputs.", []), "a card of onefold is replaced"
    assert "# u.onnx" in card.read_text()
    card.write_text(written.replace(MARK + "\n", "") + "changed")
    assert not write_card(detector, tmp_path / "t.onnx", "Inputs.", [])
    assert card.read_text().endswith("changed")


def test_check_fails_if_decisions_differ(table: Any, capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    detector, folder = table
    detector.save(tmp_path / "t.onefold")
    original = Alarm.exceeds
    monkeypatch.setattr(Alarm, "exceeds", lambda self, scores: original(self, scores) ^ (np.arange(len(scores)) < 3))
    command = ["export", str(tmp_path / "t.onefold"), str(tmp_path / "t.pt2"), "--check", str(folder / "new.csv")]
    assert main(command) == 1
    assert "197 of 200 decisions agree, 3 differ elsewhere" in capsys.readouterr().out


def test_an_exported_model_is_opened_with_care(tmp_path: Path) -> None:
    (tmp_path / "d.onnx").write_bytes(b"not a model")
    with pytest.raises(FileError, match=r"d\.onnx: damaged, or not an exported detector"):
        ExportedModel(tmp_path / "d.onnx")
    with pytest.raises(FileError, match=r"e\.onnx: no such file"):
        ExportedModel(tmp_path / "e.onnx")


@pytest.mark.slow
def test_decisions_agree_on_a_thousand_photos_of_different_sizes(photos: Any, tmp_path: Path) -> None:
    detector, _ = photos
    detector.export(tmp_path / "p.onnx")
    parity = compare(detector, tmp_path / "p.onnx", str(write_photos(tmp_path / "new", 1000, 2)))
    assert parity.ok
    assert parity.inputs == 1000
    assert 0.05 < detector.is_ood(str(tmp_path / "new")).mean() < 0.5
