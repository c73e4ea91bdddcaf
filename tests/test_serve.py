"""The server of exported detectors: answers, metrics, limits, and what it does with requests that are wrong."""

import ast
import io
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import onefold
from onefold.errors import FileError, InputError
from onefold.monitor import Monitor
from onefold.serve import ExportedModel

pytest.importorskip("fastapi", reason="FastAPI is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")
pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")

from onefold.serve.app import Limits, make_app

ROOT = Path(__file__).parent.parent
SERVE = sorted((ROOT / "src" / "onefold" / "serve").glob("*.py"))
JSON = {"content-type": "application/json"}


def client(app: Any) -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Starlette announces another HTTP library
        from starlette.testclient import TestClient

    return TestClient(app, raise_server_exceptions=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three exported detectors: of vectors, of a table, and of image files."""
    folder = tmp_path_factory.mktemp("serve")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 4)).astype(np.float32)
    detector = onefold.KNN(k=3).fit(x[:150]).calibrate(x[150:], fpr=0.1)
    detector.export(folder / "vectors.onnx")
    detector.save(folder / "vectors.onefold")
    rows = "\n".join(f"{a:.4f},{b:.4f},{'rgb'[i % 3]}" for i, (a, b) in enumerate(x[:, :2]))
    (folder / "t.csv").write_text(f"a,b,colour\n{rows}\n")
    onefold.KNN(k=3).fit(folder / "t.csv").calibrate(folder / "t.csv", fpr=0.1).export(folder / "table.onnx")
    (folder / "images").mkdir()
    for i in range(40):
        pixels = rng.integers(0, 256, (20 + i, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((60, 20 + i)).save(folder / "images" / f"{i:02}.jpg")
    detector = onefold.KNN(k=3).fit(folder / "images").calibrate(folder / "images", fpr=0.1)
    detector.export(folder / "images.onnx")
    detector.save(folder / "images.onefold")
    return folder


@pytest.fixture(scope="module")
def vectors(folder: Path) -> ExportedModel:
    return ExportedModel(folder / "vectors.onnx", threads=1)


def metrics_of(server: Any) -> dict[str, float]:
    lines = (line for line in server.get("/metrics").text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


# --- answers ----------------------------------------------------------------------------------------------------------


def test_rows_get_the_scores_of_the_detector(folder: Path, vectors: ExportedModel) -> None:
    x = np.random.default_rng(1).normal(size=(20, 4)).astype(np.float32) * 2
    answer = client(make_app(vectors)).post("/score", json={"rows": x.tolist()})
    assert answer.status_code == 200
    detector = onefold.load(folder / "vectors.onefold")
    results = answer.json()
    np.testing.assert_allclose(results["score"], detector.score(x), rtol=1e-4)
    np.testing.assert_allclose(results["pvalue"], detector.pvalue(x))
    assert results["is_ood"] == detector.is_ood(x).tolist()
    assert 0 < sum(results["is_ood"]) < 20


def test_an_image_gets_the_score_of_the_detector(folder: Path) -> None:
    server = client(make_app(ExportedModel(folder / "images.onnx")))
    detector = onefold.load(folder / "images.onefold")
    scores = detector.score(folder / "images")
    for i in (0, 17):
        body = (folder / "images" / f"{i:02}.jpg").read_bytes()
        for kind in ("image/jpeg", "application/octet-stream"):
            answer = server.post("/score", content=body, headers={"content-type": kind})
            np.testing.assert_allclose(answer.json()["score"], scores[i : i + 1], rtol=1e-3)


def test_a_row_of_a_table_is_an_object(folder: Path) -> None:
    server = client(make_app(ExportedModel(folder / "table.onnx")))
    rows = [{"a": 0.1, "b": None, "colour": "r"}, {"a": 0.1, "b": 0.2, "colour": "new"}]
    assert server.post("/score", json={"rows": rows}).json()["is_ood"] == [True, True]
    rows = [{"a": 0.1, "b": 0.2, "colour": "r"}]
    assert server.post("/score", json={"rows": rows}).json()["is_ood"] == [False]


def test_a_score_that_is_not_finite_is_null_and_an_alarm(vectors: ExportedModel, monkeypatch: Any) -> None:
    broken = vectors.run({"x": np.full((1, 4), np.nan, np.float32)})
    monkeypatch.setattr(vectors, "score_rows", lambda _: broken)
    server = client(make_app(vectors))
    answer = server.post("/score", json={"rows": [[0, 0, 0, 0]]}).json()
    assert (answer["score"], answer["is_ood"]) == ([None], [True])
    metrics = metrics_of(server)
    assert (metrics["onefold_nan_scores_total"], metrics["onefold_alarms_total"]) == (1, 1)
    assert metrics["onefold_score_count"] == 0


# --- metrics and the monitor ------------------------------------------------------------------------------------------


def test_metrics_count_inputs_alarms_and_evidence(vectors: ExportedModel) -> None:
    server = client(make_app(vectors, alpha=0.01))
    x = np.random.default_rng(2).normal(size=(60, 4)) * 3
    answers = [server.post("/score", json={"rows": part.tolist()}).json() for part in np.split(x, 3)]
    scores = np.concatenate([answer["score"] for answer in answers])
    alarms = sum(sum(answer["is_ood"]) for answer in answers)
    server.post("/score", content=b"{", headers=JSON)
    metrics = metrics_of(server)
    assert all(name.startswith("onefold_") for name in metrics)
    assert metrics['onefold_requests_total{status="200"}'] == 3
    assert metrics['onefold_requests_total{status="400"}'] == 1
    assert metrics["onefold_inputs_total"] == metrics["onefold_score_count"] == metrics["onefold_pvalue_count"] == 60
    assert metrics["onefold_alarms_total"] == metrics["onefold_monitor_alarms"] == alarms
    assert metrics["onefold_score_sum"] == pytest.approx(scores.sum())
    median = vectors.metadata["quantiles"][4]
    assert metrics[f'onefold_score_bucket{{le="{median}"}}'] == (scores <= median).sum()
    reference = Monitor.from_metadata(vectors.metadata, 0.01).update_scores(scores)
    assert reference.crossed, "these inputs are three times as wide"
    assert metrics["onefold_monitor_log10_score"] == pytest.approx(reference.log10_score)
    assert metrics["onefold_monitor_crossed"] == 1
    assert server.get("/health").json() == {
        "status": "ok", "model": "vectors.onnx", "input": "arrays", "inputs": 60, "crossed_at": reference.crossed_at,
    }  # fmt: skip


def test_the_evidence_survives_a_restart(vectors: ExportedModel, folder: Path, tmp_path: Path) -> None:
    rows = {"rows": np.random.default_rng(3).normal(size=(30, 4)).tolist()}
    for count in (30, 60):
        with client(make_app(vectors, state=tmp_path / "monitor.json")) as server:
            server.post("/score", json=rows)
            assert metrics_of(server)["onefold_monitor_inputs"] == count
            assert metrics_of(server)["onefold_inputs_total"] == 30
    with pytest.raises(FileError, match="another calibration"):
        make_app(ExportedModel(folder / "table.onnx"), state=tmp_path / "monitor.json")


def test_a_detector_without_threshold_is_refused(folder: Path) -> None:
    model = ExportedModel(folder / "vectors.onnx")
    model.metadata["threshold"] = None
    with pytest.raises(InputError, match=r"vectors\.onnx: has no threshold"):
        make_app(model)


# --- bad requests -----------------------------------------------------------------------------------------------------

ROWS: dict[str, tuple[Any, int, str]] = {
    "no rows": ({"rows": []}, 422, "rows: must be a list of at least one row"),
    "not a list": ({"rows": 3}, 422, "body: must be an object"),
    "no object": ([1], 422, "body: must be an object"),
    "wrong width": ({"rows": [[1, 2]]}, 422, "x: each row needs numbers of shape [4]"),
    "ragged": ({"rows": [[1, 2, 3, 4], [1]]}, 422, "x: each row needs numbers of shape [4]"),
    "text": ({"rows": [["1", "2", "3", "4"]]}, 422, "x: each row needs numbers of shape [4]"),
    "null": ({"rows": [[None, 2, 3, 4]]}, 422, "x: each row needs numbers of shape [4]"),
    "objects": ({"rows": [{"x": 1}]}, 422, "x: each row needs numbers of shape [4]"),
    "booleans": ({"rows": [[True, True, True, True]]}, 422, "x: each row needs numbers of shape [4]"),
    "too large": ({"rows": [[1e300, 2, 3, 4]]}, 422, "x: values are NaN, infinite, or too large for float32"),
    "huge integer": ({"rows": [[10**400, 2, 3, 4]]}, 422, "x: each row needs numbers"),
    "too many": ({"rows": [[1, 2, 3, 4]] * 9}, 413, "rows: 9 are more than 8. Send fewer at once."),
}
BODIES: dict[str, tuple[bytes, str, int, str]] = {
    "empty": (b"", "application/json", 400, "body: not valid JSON"),
    "cut": (b'{"rows": [[1', "application/json", 400, "body: not valid JSON"),
    "NaN": (b'{"rows": [[NaN, 1, 1, 1]]}', "application/json", 400, "body: not valid JSON"),
    "infinity": (b'{"rows": [[1e999, 1, 1, 1]]}', "application/json", 422, "x: values are NaN, infinite"),
    "deep": (b"[" * 100_000, "application/json", 400, "body: not valid JSON"),
    "long integer": (b'{"rows": [[' + b"9" * 5000 + b"]]}", "application/json", 400, "body: not valid JSON"),
    "not UTF-8": (b'{"rows": "\xff"}', "application/json", 400, "body: not valid JSON"),
    "form": (b"a=1", "application/x-www-form-urlencoded", 415, "content-type: send application/json or an image"),
    "image": (b"\x89PNG", "image/png", 422, "this model does not take images. Send rows as JSON."),
    "long": (b" " * 5001, "application/json", 413, "body: more than 5,000 bytes"),
}


@pytest.fixture(scope="module")
def strict(vectors: ExportedModel) -> Any:
    return client(make_app(vectors, Limits(body=5000, rows=8)))


def one_line(answer: Any, status: int, message: str) -> None:
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"]
    assert answer.json()["error"].startswith(message)
    assert "\n" not in answer.json()["error"]


@pytest.mark.parametrize("name", ROWS)
def test_wrong_rows_are_one_line(name: str, strict: Any) -> None:
    content, status, message = ROWS[name]
    one_line(strict.post("/score", content=json.dumps(content), headers=JSON), status, message)


@pytest.mark.parametrize("name", BODIES)
def test_wrong_bodies_are_one_line(name: str, strict: Any, vectors: ExportedModel) -> None:
    body, kind, status, message = BODIES[name]
    server = client(make_app(vectors, Limits(body=200_000))) if name in ("deep", "long integer") else strict
    one_line(server.post("/score", content=body, headers={"content-type": kind}), status, message)


def test_a_body_of_unknown_length_is_cut_off(strict: Any) -> None:
    sent = 0

    def parts() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 1000
            yield b" " * 1000

    one_line(strict.post("/score", content=parts(), headers=JSON), 413, "body: more than 5,000 bytes")
    one_line(strict.get("/nothing"), 404, "Not Found")
    one_line(strict.get("/score"), 405, "Method Not Allowed")
    length = {"content-length": "9" * 30, **JSON}
    one_line(strict.post("/score", content=b"{}", headers=length), 413, "body: more than 5,000 bytes")


def test_wrong_rows_of_a_table_and_wrong_images_are_one_line(folder: Path) -> None:
    server = client(make_app(ExportedModel(folder / "table.onnx")))
    row = {"a": 1, "b": 2, "colour": "r"}
    for rows, message in (
        ([{"a": 1, "b": 2}], "rows: row 0 has no column 'colour'"),
        ([row, {**row, "c": 1}], "rows: row 1 has an unknown column ('c')"),
        ([{**row, "a": "1"}], "rows: column 'a', row 0: must be a finite number or null"),
        ([{**row, "a": 10**400}], "rows: column 'a', row 0: must be a finite number or null"),
        ([{**row, "colour": ["r"]}], "rows: column 'colour', row 0: must be text or null"),
        ([[1, 2, "r"]], "rows: row 0 must be an object of columns"),
    ):
        one_line(server.post("/score", json={"rows": rows}), 422, message)
    server = client(make_app(ExportedModel(folder / "images.onnx")))
    one_line(server.post("/score", json={"rows": [[1]]}), 422, "this model takes an image. Send the image file.")
    whole = (folder / "images" / "00.jpg").read_bytes()
    for body in (b"", b"no image", whole[: len(whole) // 2], b"GIF89a" + b"\xff" * 50):
        one_line(server.post("/score", content=body, headers={"content-type": "image/jpeg"}), 422, "image: cannot be")
    bomb = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(bomb, "PNG")
    answer = server.post("/score", content=bomb.getvalue(), headers={"content-type": "image/png"})
    one_line(answer, 422, "image: cannot be decoded (more than 64,000,000 pixels)")


TOKENS = list(b'[]{}",:0123456789eE.-nulltrue')


def mutations(rng: np.random.Generator, valid: list[bytes]) -> Iterator[bytes]:
    """Yield requests with changed, removed, repeated and added bytes."""
    while True:
        body = bytearray(valid[rng.integers(len(valid))])
        for _ in range(rng.integers(1, 6)):
            at, length = int(rng.integers(len(body) + 1)), int(rng.integers(1, 20))
            new = rng.bytes(length) if rng.random() < 0.5 else bytes(rng.choice(TOKENS, length).tolist())
            match rng.integers(4):
                case 0:
                    body[at : at + length] = new
                case 1:
                    del body[at : at + length]
                case 2:
                    body[at:at] = body[at : at + length] * int(rng.integers(1, 50))
                case _:
                    body[at:at] = new
        yield bytes(body)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def send_malformed(folder: Path, count: int) -> list[int]:
    """Send mutated requests to the three servers; return the statuses."""
    rng = np.random.default_rng(0)
    table = json.dumps({"rows": [{"a": 1.5, "b": None, "colour": "r"}, {"a": -1, "b": 2e3, "colour": "g"}]}).encode()
    image = (folder / "images" / "00.jpg").read_bytes()
    png = io.BytesIO()
    Image.open(folder / "images" / "01.jpg").save(png, "PNG")
    kinds = {
        "vectors": (JSON, mutations(rng, [b'{"rows": [[1, 2.5, -3e2, 4], [0, 0, 0, 0]]}'])),
        "table": (JSON, mutations(rng, [table])),
        "images": ({"content-type": "image/jpeg"}, mutations(rng, [image, png.getvalue()])),
    }
    servers = {name: client(make_app(ExportedModel(folder / f"{name}.onnx", threads=1))) for name in kinds}
    statuses: list[int] = []
    sizes: list[int] = []
    for i in range(count):
        name = list(kinds)[i % 3]
        headers, bodies = kinds[name]
        answer = servers[name].post("/score", content=next(bodies), headers=headers)
        statuses.append(answer.status_code)
        if answer.status_code != 200:
            assert set(answer.json()) == {"error"}
            assert "\n" not in answer.json()["error"]
        if i % (count // 10) == count // 10 - 1:
            sizes.append(resident_bytes())
    for server in servers.values():
        assert server.get("/health").status_code == 200
    assert sizes[-1] - sizes[len(sizes) // 2] < 20 * 2**20, "memory grows"
    return statuses


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory from /proc")
def test_malformed_requests_do_not_stop_the_server(folder: Path) -> None:
    statuses = send_malformed(folder, 600)
    assert set(statuses) <= {200, 400, 413, 422}
    assert sum(status != 200 for status in statuses) > 200


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory from /proc")
def test_ten_thousand_malformed_requests_do_not_stop_the_server(folder: Path) -> None:
    assert set(send_malformed(folder, 10_000)) <= {200, 400, 413, 422}


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["vectors", "table", "images"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_requests_from_the_servers_own_description_are_answered(name: str, count: int, folder: Path) -> None:
    """Requests that fit the OpenAPI description, and ones that do not; answers must fit it, and none is a 5xx."""
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from schemathesis import GenerationMode

    app = make_app(ExportedModel(folder / f"{name}.onnx", threads=1))
    operation = schemathesis.openapi.from_asgi("/openapi.json", app)["/score"]["POST"]
    statuses: list[int] = []

    def send(case: Any) -> None:
        answer = case.call()
        statuses.append(answer.status_code)
        assert answer.status_code in (200, 400, 413, 415, 422), answer.text
        operation.validate_response(answer)

    modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
    for mode in modes[:1] if name == "images" else modes:  # every body fits the description of an image
        options = settings(
            max_examples=count // 2, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        )  # fmt: skip
        seed(0)(options(given(case=operation.as_strategy(generation_mode=mode))(send)))()
    assert 200 in statuses
    if name != "images":  # schemathesis has only a few images
        assert len(statuses) >= count // 4
        assert any(status >= 400 for status in statuses)


# --- without torch ----------------------------------------------------------------------------------------------------


def test_the_server_imports_few_packages_of_onefold() -> None:
    modules = set()
    for path in SERVE:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onefold"):
                modules.add((node.module or "").split(".")[1])
    assert modules <= {"decode", "errors", "monitor", "serve", "types", "metrics"}


WITHOUT_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is imported")
sys.meta_path.insert(0, NoTorch())
from onefold.cli import main
status = main(sys.argv[1:])
print('status', status, flush=True)
"""


def post(url: str, content: Any) -> Any:
    request = urllib.request.Request(f"{url}/score", json.dumps(content).encode(), JSON)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def start(command: list[Any], **keywords: Any) -> tuple[subprocess.Popen[str], str]:
    """Start a server and return its process and address."""
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True, **keywords)
    assert process.stdout is not None
    line = process.stdout.readline()
    address = re.search(r"http://[\d.]+:\d+", line)
    if address is None:
        process.kill()
        pytest.fail(line + process.communicate()[0])
    return process, address[0]


def test_the_command_serves_where_torch_cannot_be_imported(folder: Path, tmp_path: Path) -> None:
    state = tmp_path / "monitor.json"
    command = [sys.executable, "-c", WITHOUT_TORCH, "serve", folder / "vectors.onnx", "--port", "0", "--state", state]
    process, url = start(command, env={**os.environ, "JAXTYPING_DISABLE": "1"})
    try:
        assert url.startswith("http://127.0.0.1:")
        answer = post(url, {"rows": [[0, 0, 0, 0], [9, 9, 9, 9]]})
        with pytest.raises(urllib.error.HTTPError) as error:
            post(url, {"rows": 1})
        error.value.close()
        assert error.value.code == 422
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=120)[0]
    finally:
        process.kill()
    assert answer["is_ood"] == [False, True]
    assert output.splitlines()[-1] == "status 0"
    assert json.loads(state.read_text())["inputs"] == 2


def test_errors_of_the_command_are_one_line(folder: Path, capsys: Any) -> None:
    from onefold.cli import main

    for arguments, message in (
        (["nothing.onnx"], "onefold: nothing.onnx: no such file. Write it with onefold export.\n"),
        ([str(folder / "vectors.onefold")], "damaged, or not an exported detector"),
        ([str(folder / "vectors.onnx"), "--port", "70000"], "onefold: --port: must be an integer from 0 to 65,535"),
        ([str(folder / "vectors.onnx"), "--alpha", "2"], "onefold: --alpha: "),
    ):
        assert main(["serve", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def requirements() -> dict[str, str]:
    lines = (ROOT / "deploy" / "requirements.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_the_requirements_of_the_image_are_the_tested_versions() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = dict(line.lower().replace("_", "-").split("==") for line in lines if not line.startswith("#"))
    assert requirements().items() <= tested.items()
    assert "torch" not in requirements()
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (.+) \S+$", dockerfile, re.MULTILINE):
        assert all((ROOT / name).exists() for name in line.split())


@pytest.mark.slow
def test_a_fresh_environment_without_torch_serves(folder: Path, tmp_path: Path) -> None:
    """The steps of deploy/Dockerfile, in a virtual environment; the image itself needs Docker."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    source = tmp_path / "onefold"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "src"):
        subprocess.run(["cp", "-r", ROOT / name, source], check=True)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([*pip, "-r", ROOT / "deploy" / "requirements.txt"], check=True, env=environment, cwd=tmp_path)
    subprocess.run([*pip, "--no-deps", source], check=True, env=environment, cwd=tmp_path)
    listed = subprocess.run([python, "-m", "pip", "list"], check=True, env=environment, capture_output=True, text=True)
    assert not re.search(r"^(torch|scikit-learn|matplotlib)\b", listed.stdout, re.MULTILINE)
    command = [tmp_path / "venv" / "bin" / "onefold", "serve", folder / "images.onnx", "--port", "0"]
    process, url = start(command, env=environment, cwd=tmp_path)
    try:
        body = (folder / "images" / "03.jpg").read_bytes()
        request = urllib.request.Request(f"{url}/score", body, {"content-type": "image/jpeg"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            results = json.loads(answer.read())
        with urllib.request.urlopen(f"{url}/metrics", timeout=120) as answer:
            assert b"onefold_inputs_total 1.0" in answer.read()
    finally:
        process.terminate()
        process.communicate(timeout=120)
    expected = onefold.load(folder / "images.onefold").score(folder / "images" / "03.jpg")
    np.testing.assert_allclose(results["score"], expected, rtol=1e-3)
