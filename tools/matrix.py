"""Run tests on every supported Python, with the lowest and the newest supported dependencies.

    python tools/matrix.py [--python 3.11 3.12] [--versions lowest newest] [--folder out/matrix] [--keep]

For each combination, the script makes an environment, runs a part of the tests in it, and removes it; its log is kept.
`--torch-index` is a package index with torch for the CPU; torch from the public index needs gigabytes of CUDA packages.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTHONS = ("3.11", "3.12")
EXTRAS_OF_DEVELOPERS = ("docs", "dev")
TEST_PACKAGES = ("pytest", "pytest-xdist", "hypothesis", "beartype", "pandas")
# Installed without their dependencies, which include torchvision: see CONTRIBUTING.md
WITHOUT_DEPENDENCIES = {"laplace-torch": "0.3", "backpack-for-pytorch": "1.7.1", "curvlinops-for-pytorch": "3.0.1"}

# Tests of each dependency; tests/test_release.py checks that the list is complete.
EXPORTS = [f"tests/test_detector.py::test_exported_models_score_alike_for_any_batch[{name}]"
           for name in ("vectors-CSD", "bytes-LastLayerGP")]  # fmt: skip
LAPLACE = ["tests/test_methods.py::test_laplace_of_biases_alone_is_the_textbooks"]
MLFLOW = ["tests/test_mlflow.py"]
SERVER = ["tests/test_serve.py::test_the_command_serves_where_torch_cannot_be_imported"]
PAGES = ["tests/test_cli.py::test_the_page_is_self_contained_and_escapes_what_it_shows"]
CHECKS: dict[str, list[str]] = {
    "torch": ["tests/test_train.py::test_resuming_anywhere_gives_the_uninterrupted_result",
              "tests/test_train.py::test_adam_with_the_schedule_is_torchs_adam",
              "tests/test_kernels.py::test_infinite_agrees_with_neural_tangents"],
    "numpy": ["tests/test_metrics_and_data.py"],
    "scikit-learn": ["tests/test_sklearn.py::test_scikit_learns_own_checks_pass"],
    "scipy": ["tests/test_runs_report.py::test_intervals_are_students"],
    "safetensors": ["tests/test_files.py::test_hostile_files_are_refused",
                    "tests/test_train.py::test_files_round_trip"],
    "jaxtyping": ["tests/test_metrics_and_data.py"],
    "tyro": ["tests/test_cli.py::test_help_teaches_and_version_is_one_line",
             "tests/test_cli.py::test_bad_arguments_fail_without_a_traceback"],
    "rich": ["tests/test_train.py::test_progress_shows_loss_and_time_left",
             "tests/test_cli.py::test_the_page_names_the_axis_and_marks_flagged_images"],
    "matplotlib": [*PAGES, "tests/test_cli.py::test_the_plane_is_drawn_on_one_scale"],
    "jinja2": PAGES,
    "pillow": ["tests/test_sources.py"],
    "pooch": ["tests/test_data_sets.py"],
    "requests": ["tests/test_data_sets.py"],
    **dict.fromkeys(("tqdm", "opt-einsum", "torchmetrics", "einops", "unfoldnd", "einconv", "linear-operator",
                     "asdfghjkl"), LAPLACE),
    "posteriors": ["tests/test_sgmcmc.py::test_a_killed_fit_goes_on_as_if_nothing_had_happened[baoa]"],
    **dict.fromkeys(("onnx", "onnxscript", "onnxruntime"), EXPORTS),
    "transformers": ["tests/test_embedding.py", "tests/test_pretrained.py"],
    "tokenizers": ["tests/test_pretrained.py"],
    "huggingface-hub": ["tests/test_pretrained.py"],
    **dict.fromkeys(("fastapi", "uvicorn", "prometheus-client"), SERVER),
    **dict.fromkeys(("mlflow-skinny", "pandas"), MLFLOW),
    "ray": ["tests/test_bench.py::test_ray_goes_on_when_a_node_is_lost"],
    "av": ["tests/test_runs.py::test_an_mp4_has_the_games_speed_and_holds_the_last_frame"],
    "vizdoom": ["tests/test_doom.py"],
    "stable-baselines3": ["tests/test_sb3.py"],
    "gymnasium": ["tests/test_doom.py", "tests/test_small_envs.py", "tests/test_bonus.py"],
    "tensorboard": ["tests/test_stopped_runs.py::test_resuming_removes_later_points_from_tensorboard"],
    "optuna": ["tests/test_bench.py::test_a_search_tries_every_value_once_and_goes_on_with_the_best"],
    "pyarrow": ["tests/test_sources.py"],
}  # fmt: skip
SLOW = CHECKS["ray"]  # marked slow, but the only tests of Ray


@dataclass(frozen=True)
class Cell:
    """Outcome of one combination."""

    python: str
    versions: str
    outcome: str  # passed, failed, not installed, not run
    detail: str
    torch: str = "–"
    seconds: float = 0.0

    def row(self) -> str:
        """Return the row of the table."""
        took = f"{self.seconds:.0f} s" if self.seconds else "–"
        return f"| {self.python} | {self.versions} | {self.torch} | {self.outcome} | {took} | {self.detail} |"


class InstallError(Exception):
    """Message of pip that says why an installation failed."""


def read_requirements() -> dict[str, list[str]]:
    """Return the requirements of each extra; the core requirements are under ''."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return {"": table["dependencies"], **table["optional-dependencies"]}


def normalise(name: str) -> str:
    """Return a package name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: Sequence[str]) -> list[str]:
    """Return the package names of requirements."""
    return [normalise(match.group()) for text in requirements if (match := re.match(r"[A-Za-z0-9._-]+", text))]


def lowest(requirements: Sequence[str]) -> list[str]:
    """Return `name==1.2` for each `name>=1.2`; requirements without a lower bound are left out."""
    bounds = (re.match(r"([A-Za-z0-9._-]+)(?:\[.*?\])?\s*>=\s*([0-9][0-9a-z.]*)", text) for text in requirements)
    return [f"{normalise(bound.group(1))}=={bound.group(2)}" for bound in bounds if bound]


def find_interpreter(version: str) -> Path | None:
    """Return a working Python of this version, from PATH or pyenv; None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python{version}"), *sorted(map(str, pyenv.glob(f"{version}.*/bin/python{version}")))]
    script = "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"
    for path in filter(None, candidates):
        done = subprocess.run([path, "-c", script], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip() == version:
            return Path(path)
    return None


def run(command: Sequence[str | Path], log: Path, limit: float) -> tuple[int, str]:
    """Run a command; return its exit code and its output, which is also appended to the log."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(map(str, command))}\n")
        file.flush()
        start = file.tell()
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=file, stderr=file, check=False, timeout=limit
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    with log.open(encoding="utf-8", errors="replace") as file:
        file.seek(start)
        return code, file.read()


def install(python: Path, versions: str, work: Path, log: Path, torch_index: str | None) -> None:
    """Install onefold (not editable) with its extras, except those of developers, and the packages of the tests."""
    requirements = read_requirements()
    extras = [extra for extra in requirements if extra and extra not in EXTRAS_OF_DEVELOPERS]
    constraints = work / f"{versions}.txt"
    texts = [text for extra in ("", *extras) for text in requirements[extra]]
    constraints.write_text("\n".join(lowest(texts) if versions == "lowest" else []) + "\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints]
    bare = [f"{name}=={version}" if versions == "lowest" else name for name, version in WITHOUT_DEPENDENCIES.items()]
    steps: list[list[str | Path]] = [[*pip, f"{ROOT}[{','.join(extras)}]", *TEST_PACKAGES], [*pip, "--no-deps", *bare]]
    if torch_index:
        steps.insert(0, [*pip, "torch", "--index-url", torch_index])
    for step in steps:
        code, output = run(step, log, 3600)
        if code:
            errors = [line for line in output.splitlines() if line.startswith("ERROR:")] or output.splitlines()[-1:]
            raise InstallError(errors[0].removeprefix("ERROR: ").strip() if errors else f"pip ended with {code}")


def run_tests(python: Path, log: Path) -> tuple[bool, str]:
    """Return True if the tests pass, and their counts and first failures."""
    every = dict.fromkeys(name for tests in CHECKS.values() for name in tests if name not in SLOW)
    # Old and new dependencies warn about each other; here only failures count.
    pytest = [python, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", "-W", "default", "--durations=0"]
    passed, details = True, []
    for arguments in (["-m", "not slow", *every], SLOW):
        code, output = run([*pytest, *arguments], log, 1800)
        last = next(
            (line for line in reversed(output.splitlines()) if re.search(r"\d+ (passed|failed|error)", line)), ""
        )
        failures = re.findall(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", output, re.MULTILINE)
        passed = passed and code == 0
        more = [f"and {len(failures) - 5} more"] if len(failures) > 5 else []
        counts = re.sub(r" in [\d.]+s.*|, \d+ warnings?|=+ ?", "", last) or f"pytest ended with {code}"
        details += [counts, *failures[:5], *more]
    return passed, "; ".join(details)


def installed_versions(python: Path) -> dict[str, str]:
    """Return the version of each package in an environment."""
    done = subprocess.run([python, "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=False)
    return {normalise(entry["name"]): entry["version"] for entry in json.loads(done.stdout or "[]")}


def run_cell(version: str, versions: str, options: argparse.Namespace) -> Cell:
    """Make one environment, run the tests in it, and remove it."""
    interpreter = find_interpreter(version)
    if interpreter is None:
        return Cell(version, versions, "not run", f"no Python {version} with pip on this machine")
    work: Path = options.folder / f"{version}-{versions}"
    log: Path = options.folder / f"{version}-{versions}.log"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    log.write_text("")
    start = time.monotonic()
    try:
        code, output = run([interpreter, "-m", "venv", work / "env"], log, 300)
        if code:
            return Cell(version, versions, "not installed", output.strip().splitlines()[-1])
        python = work / "env" / "bin" / "python"
        try:
            install(python, versions, work, log, options.torch_index)
        except InstallError as error:
            return Cell(version, versions, "not installed", str(error))
        installed = installed_versions(python)
        log.with_suffix(".json").write_text(json.dumps(installed, indent=1) + "\n")
        passed, details = run_tests(python, log)
        outcome = "passed" if passed else "failed"
        return Cell(version, versions, outcome, details, installed.get("torch", "–"), time.monotonic() - start)
    finally:
        if not options.keep:
            shutil.rmtree(work, ignore_errors=True)


def run_cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Yield the outcome of each combination."""
    for version in options.python:
        for versions in options.versions:
            print(f"Python {version}, {versions} versions …", file=sys.stderr, flush=True)
            yield run_cell(version, versions, options)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", nargs="+", default=PYTHONS, choices=PYTHONS)
    parser.add_argument("--versions", nargs="+", default=("lowest", "newest"), choices=("lowest", "newest"))
    parser.add_argument("--folder", type=Path, default=ROOT / "out" / "matrix", help="environments and logs")
    parser.add_argument("--torch-index", help="package index with torch for the CPU")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    options = parser.parse_args(arguments)
    options.folder = options.folder.resolve()
    table = list(run_cells(options))
    print("| Python | versions | torch | outcome | took | tests |\n|---|---|---|---|---|---|")
    print("\n".join(cell.row() for cell in table))
    if not any(cell.outcome in ("passed", "failed") for cell in table):
        print("nothing could be run here", file=sys.stderr)
        return 1
    return int(any(cell.outcome in ("failed", "not installed") for cell in table))


if __name__ == "__main__":
    raise SystemExit(main())
