"""Detectors in MLflow: the exported file as a model of the flavour `pyfunc`; no Python object is serialised."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from onefold import __version__
from onefold.core.arguments import check_path
from onefold.errors import InputError, MissingExtraError
from onefold.serve import ExportedModel, Results

try:
    import mlflow.pyfunc
    import pandas as pd
except ImportError:
    raise MissingExtraError('mlflow or pandas is not installed. Run pip install "onefold[mlflow]".') from None

ROWS = 1024  # scored at once


def log_model(exported: str | Path, name: str = "detector", **options: Any) -> Any:
    """Log an exported detector to the active MLflow run.

    Args:
        exported: The .onnx file that `export` wrote.
        name: Name of the model in the run.
        **options: Further arguments of `mlflow.pyfunc.log_model`, such as `registered_model_name`.

    Returns:
        MLflow's `ModelInfo`; its `model_uri` is for `load_model`.

    Raises:
        FileError: The file cannot be read, or onefold did not write it.
    """
    path = check_path(exported)
    ExportedModel(path)  # refuses a file that could not be loaded
    return mlflow.pyfunc.log_model(
        name=name, loader_module=__name__, data_path=str(path),
        **{"pip_requirements": [f"onefold[mlflow]=={__version__}"], **options},
    )  # fmt: skip


def load_model(uri: str) -> Any:
    """Load a detector that `log_model` logged.

    Args:
        uri: Address of the model, such as "models:/detector/1".

    Returns:
        MLflow's `PyFuncModel`. Its `predict` takes a data frame for a table, an array of samples, or a list of image
        files (paths or bytes), and returns a data frame with `score`, `pvalue` and `is_ood`.
    """
    return mlflow.pyfunc.load_model(uri)


def _load_pyfunc(path: str) -> "_Predictor":
    """Return the model of a file; MLflow calls this function by its name."""
    return _Predictor(ExportedModel(path))


class _Predictor:
    """An exported detector with the method that MLflow calls."""

    def __init__(self, model: ExportedModel) -> None:
        self.model = model

    def predict(self, data: Any, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Return `score`, `pvalue` and `is_ood` of each input."""
        del params
        results = list(self._results(data))
        names = ("score", "pvalue", "is_ood") if self.model.calibrated else ("score",)
        return pd.DataFrame({name: np.concatenate([getattr(part, name) for part in results]) for name in names})

    def _results(self, data: Any) -> Iterator[Results]:
        if self.model.kind == "image":
            files = data.iloc[:, 0] if isinstance(data, pd.DataFrame) else data
            for file in files:
                yield self.model.score_image(io.BytesIO(file) if isinstance(file, bytes) else Path(file))
            return
        rows = _as_rows(data, table=self.model.kind == "columns")
        if not rows:
            raise InputError("no rows", argument="data", hint="Pass at least one.")
        for start in range(0, len(rows), ROWS):
            yield self.model.score_rows(rows[start : start + ROWS])


def _as_rows(data: Any, *, table: bool) -> list[Any]:
    if table:
        frame = pd.DataFrame(data)
        return frame.astype(object).where(frame.notna(), None).to_dict("records")
    if isinstance(data, dict):  # a model with several inputs
        columns = {name: np.asarray(values).tolist() for name, values in data.items()}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return np.asarray(data).tolist()
