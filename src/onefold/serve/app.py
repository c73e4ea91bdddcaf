"""The HTTP application: POST /score, GET /metrics and GET /health. A bad request gets a 4xx with one line."""

import asyncio
import io
import json
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onefold.errors import InputError, MissingExtraError, visible
from onefold.serve.metrics import ServerMetrics
from onefold.serve.model import ExportedModel, Results
from onefold.serve.openapi import describe_body, describe_responses

try:
    import anyio
    from fastapi import FastAPI, Request, Response
    from starlette.exceptions import HTTPException
except ImportError:
    raise MissingExtraError('fastapi is not installed. Run pip install "onefold[serve]".') from None

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
IMAGE_TYPES = ("image/", "application/octet-stream")
LONGEST_ERROR = 300  # characters


@dataclass(frozen=True)
class Limits:
    """Limits of a server.

    Args:
        body: Bytes of a request.
        rows: Rows of a request.
        seconds: Time in which a request must have arrived.
        workers: Requests that are decoded and scored at the same time.
    """

    body: int = 16 * 2**20
    rows: int = 1024
    seconds: float = 30.0
    workers: int = 4


def make_app(
    model: ExportedModel, limits: Limits | None = None, *, alpha: float = 1e-3, state: Path | None = None
) -> FastAPI:
    """Return the application that serves an exported detector.

    Args:
        model: Exported detector with a calibration.
        limits: Limits of requests.
        alpha: Level of the monitor.
        state: File in which the monitor's state is kept.

    Returns:
        The ASGI application.

    Raises:
        InputError: The exported detector was not calibrated, or `alpha` is out of range.
        FileError: The state is of another detector, or damaged.
    """
    if not model.calibrated:
        raise InputError(f"{model.path}: has no threshold. Calibrate the detector and export it again.")
    limits = limits or Limits()
    server = ScoreServer(model, limits, ServerMetrics(model, alpha, state))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        server.metrics.save()

    app = FastAPI(title=f"onefold: {model.path.name}", lifespan=lifespan, docs_url=None, redoc_url=None)
    body = {"requestBody": describe_body(model, limits.rows)}
    app.add_api_route(
        "/score",
        server.score,
        methods=["POST"],
        openapi_extra=body,
        responses=describe_responses(),
        response_model=None,
    )
    app.add_api_route("/metrics", server.show_metrics, response_class=Response)
    app.add_api_route("/health", server.show_health, response_model=None)
    app.add_exception_handler(HTTPException, _show_error)
    return app


class ScoreServer:
    """Endpoints of one model.

    Args:
        model: Exported detector with a calibration.
        limits: Limits of requests.
        metrics: Metrics, with the monitor.
    """

    def __init__(self, model: ExportedModel, limits: Limits, metrics: ServerMetrics) -> None:
        self.model, self.limits, self.metrics = model, limits, metrics
        self._slots = anyio.CapacityLimiter(limits.workers)

    async def score(self, request: Request) -> Response:
        """Score rows or one image."""
        start = time.perf_counter()
        try:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json" and not kind.startswith(IMAGE_TYPES):
                raise HTTPException(415, "content-type: send application/json or an image (image/jpeg, image/png)")
            body = await _read_body(request, self.limits)
            content = await anyio.to_thread.run_sync(self._score_body, body, kind, limiter=self._slots)
            response = _json(content)
        except HTTPException as error:
            response = await _show_error(request, error)
        self.metrics.count_request(response.status_code, time.perf_counter() - start)
        return response

    async def show_metrics(self) -> Response:
        """Return metrics for Prometheus."""
        return Response(self.metrics.text(), media_type=METRICS_TYPE)

    async def show_health(self) -> Response:
        """Return what is served, and after how many inputs the monitor reached its limit."""
        evidence = self.metrics.evidence
        status = {"status": "ok", "model": self.model.path.name, "input": self.model.kind}
        return _json({**status, "inputs": evidence.inputs, "crossed_at": evidence.crossed_at})

    def _score_body(self, body: bytes, kind: str) -> dict[str, list[Any]]:
        try:
            if kind == "application/json":
                results = self.model.score_rows(_parse_rows(body, self.limits))
            else:
                results = self.model.score_image(io.BytesIO(body))
        except InputError as error:
            raise HTTPException(422, str(error)) from None
        self.metrics.add(results)
        return _as_lists(results)


async def _show_error(_: Request, error: Any) -> Response:
    return _json({"error": visible(str(error.detail))[:LONGEST_ERROR]}, error.status_code, error.headers)


async def _read_body(request: Request, limits: Limits) -> bytes:
    """Return the body of a request; stop reading beyond the limit."""
    too_large = HTTPException(413, f"body: more than {limits.body:,} bytes. Send fewer rows or a smaller image.")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 18 or int(length) > limits.body:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.seconds):
            async for part in request.stream():
                body += part
                if len(body) > limits.body:
                    raise too_large
    except TimeoutError:
        raise HTTPException(408, f"body: did not arrive within {limits.seconds:g} seconds. Send it again.") from None
    return bytes(body)


def _parse_rows(body: bytes, limits: Limits) -> list[Any]:
    try:
        content = json.loads(body, parse_constant=_refuse)
    except (ValueError, RecursionError):  # ValueError: of JSON, of UTF-8, and of an integer with too many digits
        raise HTTPException(400, "body: not valid JSON") from None
    rows = content.get("rows") if isinstance(content, dict) else None
    if not isinstance(rows, list):
        raise HTTPException(422, 'body: must be an object {"rows": [...]}')
    if len(rows) > limits.rows:
        raise HTTPException(413, f"rows: {len(rows):,} are more than {limits.rows:,}. Send fewer at once.")
    return rows


def _refuse(constant: str) -> float:
    raise ValueError(constant)  # NaN and Infinity are not JSON


def _as_lists(results: Results) -> dict[str, list[Any]]:
    """Return results as JSON content; a score that is not finite is null, and such an input is an alarm."""
    assert results.pvalue is not None
    assert results.is_ood is not None
    scores = [score if math.isfinite(score) else None for score in results.score.tolist()]
    return {"score": scores, "pvalue": results.pvalue.tolist(), "is_ood": results.is_ood.tolist()}


def _json(content: Any, status: int = 200, headers: Any = None) -> Response:
    return Response(json.dumps(content, allow_nan=False) + "\n", status, headers, "application/json")
