"""Metrics of a server in the format of Prometheus; every name begins with `onefold_`."""

import threading
import time
from pathlib import Path

import numpy as np

from onefold.errors import MissingExtraError
from onefold.monitor import Evidence, Monitor
from onefold.serve.model import ExportedModel, Results

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
except ImportError:
    raise MissingExtraError('prometheus-client is not installed. Run pip install "onefold[serve]".') from None

PVALUES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
SAVE_INTERVAL = 10.0  # seconds between two writes of the monitor's state


class ServerMetrics:
    """Counts, histograms and the monitor of one server; threads may share it.

    Args:
        model: Exported detector with a calibration.
        alpha: Level of the monitor.
        state: File in which the monitor's state is kept, or None; it is resumed if the file exists.
    """

    def __init__(self, model: ExportedModel, alpha: float, state: Path | None) -> None:
        self._lock, self._state, self._saved = threading.Lock(), state, time.monotonic()
        self._monitor = Monitor.from_metadata(model.metadata, alpha)
        if state is not None and state.exists():
            self._monitor.load(state)
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("onefold_requests", "Requests to /score.", ["status"], registry=registry)
        self._seconds = Histogram(
            "onefold_request_seconds", "Duration of requests to /score.", buckets=SECONDS, registry=registry
        )
        self._inputs = Counter("onefold_inputs", "Inputs that were scored.", registry=registry)
        self._alarms = Counter("onefold_alarms", "Inputs that raised an alarm.", registry=registry)
        self._nan = Counter("onefold_nan_scores", "Inputs whose score is NaN or infinite.", registry=registry)
        quantiles = model.metadata["quantiles"]  # of the calibration scores: familiar inputs fill all buckets
        self._scores = Histogram("onefold_score", "Finite scores of inputs.", buckets=quantiles, registry=registry)
        self._pvalues = Histogram("onefold_pvalue", "p-values of inputs.", buckets=PVALUES, registry=registry)
        for name, text, value in (
            ("inputs", "Inputs that the monitor has seen.", lambda: self.evidence.inputs),
            ("alarms", "Alarms that the monitor has seen.", lambda: self.evidence.alarms),
            ("expected_alarms", "Alarms that familiar inputs would raise.", lambda: self.evidence.expected),
            ("log10_score", "Decimal logarithm of the betting score.", lambda: self.evidence.log10_score),
            ("log10_limit", "Limit of the betting score.", lambda: self.evidence.log10_limit),
            ("crossed", "1 if the score has reached its limit.", lambda: float(self.evidence.crossed)),
        ):
            Gauge(f"onefold_monitor_{name}", text, registry=registry).set_function(value)

    @property
    def evidence(self) -> Evidence:
        """The monitor's evidence so far."""
        with self._lock:
            return self._monitor.evidence

    def add(self, results: Results) -> None:
        """Count the results of a request, and add their scores to the evidence."""
        assert results.pvalue is not None
        assert results.is_ood is not None
        scores = results.score.astype(np.float64)
        finite = scores[np.isfinite(scores)]
        self._inputs.inc(len(scores))
        self._alarms.inc(int(results.is_ood.sum()))
        self._nan.inc(len(scores) - len(finite))
        for score in finite.tolist():
            self._scores.observe(score)
        for pvalue in results.pvalue.tolist():
            self._pvalues.observe(pvalue)
        with self._lock:
            self._monitor.update_scores(scores)
            if self._state is not None and time.monotonic() > self._saved + SAVE_INTERVAL:
                self._monitor.save(self._state)
                self._saved = time.monotonic()

    def count_request(self, status: int, seconds: float) -> None:
        """Count a request to /score."""
        self._requests.labels(str(status)).inc()
        self._seconds.observe(seconds)

    def save(self) -> None:
        """Write the monitor's state, if it has a file."""
        with self._lock:
            if self._state is not None:
                self._monitor.save(self._state)

    def text(self) -> bytes:
        """Return all metrics in the format of Prometheus."""
        return generate_latest(self._registry)
