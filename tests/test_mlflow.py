"""Exported detectors in MLflow, with the real library."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import onefold
from onefold.errors import FileError

pytest.importorskip("mlflow", reason="MLflow is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An active run of a tracking store in a folder, and the folder of its files."""
    import mlflow

    folder = tmp_path_factory.mktemp("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
    mlflow.set_experiment(experiment_id=mlflow.create_experiment("onefold", f"file://{folder / 'artifacts'}"))
    with mlflow.start_run() as run:
        yield run, folder / "artifacts"
    mlflow.set_tracking_uri("")


def test_a_logged_table_scores_data_frames(run: Any, tmp_path: Path) -> None:
    from onefold.integrations.mlflow import load_model, log_model

    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=200), "colour": rng.choice(["red", "blue"], 200)})
    detector = onefold.KNN(k=3).fit(frame).calibrate(frame, fpr=0.1)
    detector.export(tmp_path / "t.onnx")
    info = log_model(tmp_path / "t.onnx", name="detector")
    new = pd.DataFrame({"colour": ["red", None, "green"], "a": [0.1, 0.2, np.nan]})
    table = load_model(info.model_uri).predict(new)
    assert list(table.columns) == ["score", "pvalue", "is_ood"]
    np.testing.assert_allclose(table["score"], detector.score(new), rtol=1e-4)
    np.testing.assert_array_equal(table["is_ood"], detector.is_ood(new))
    stored = {path.suffix for path in run[1].rglob("*") if path.is_file()}
    assert ".onnx" in stored
    assert ".pkl" not in stored
    assert run[0].info.run_id == info.run_id


def test_a_logged_model_of_arrays_scores_more_rows_than_a_batch(run: Any, tmp_path: Path) -> None:
    from onefold.integrations.mlflow import load_model, log_model

    assert run
    x = np.random.default_rng(0).normal(size=(2500, 3)).astype(np.float32)
    detector = onefold.LastLayerGP().fit(x[:200])
    detector.export(tmp_path / "v.onnx")
    table = load_model(log_model(tmp_path / "v.onnx").model_uri).predict(x)
    assert list(table.columns) == ["score"], "not calibrated"
    np.testing.assert_allclose(table["score"], detector.score(x), rtol=1e-3, atol=1e-4)


def test_a_logged_model_of_images_scores_files_and_bytes(run: Any, tmp_path: Path) -> None:
    from onefold.integrations.mlflow import load_model, log_model

    assert run
    (tmp_path / "images").mkdir()
    rng = np.random.default_rng(0)
    for i in range(20):
        Image.fromarray(rng.integers(0, 256, (30, 20 + i, 3), dtype=np.uint8)).save(tmp_path / "images" / f"{i:02}.png")
    detector = onefold.KNN(k=3).fit(tmp_path / "images").calibrate(tmp_path / "images", fpr=0.1)
    detector.export(tmp_path / "i.onnx")
    files = sorted((tmp_path / "images").iterdir())
    model = load_model(log_model(tmp_path / "i.onnx").model_uri)
    scores = detector.score(tmp_path / "images")
    for data in ([str(file) for file in files], [file.read_bytes() for file in files]):
        np.testing.assert_allclose(model.predict(data)["score"], scores, rtol=1e-3)


def test_a_file_that_could_not_be_loaded_is_not_logged(tmp_path: Path) -> None:
    from onefold.integrations.mlflow import log_model

    (tmp_path / "x.onnx").write_bytes(b"no model")
    with pytest.raises(FileError, match="not an exported detector"):
        log_model(tmp_path / "x.onnx")
