"""Every Python that onefold allows, with the lowest and the newest allowed dependencies: what runs here and what not.

    python tools/matrix.py [--python 3.11 3.12] [--versions lowest newest] [--folder out/matrix] [--keep]

One environment at a time is made, tried by a quick part of the tests, and removed; its log stays. `--torch-index` takes
an index with a torch for CPUs alone, where there is one: a torch from the public index brings gigabytes of CUDA.
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
APART = ("docs", "dev")  # neither is part of what users run
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "beartype", "pandas")
# Without their dependencies, among which is torchvision: see CONTRIBUTING.md
BARE = {"laplace-torch": "0.3", "backpack-for-pytorch": "1.7.1", "curvlinops-for-pytorch": "3.0.1"}

# What tries which dependency; tests/test_release.py sees that none is left out.
EXPORTS = [f"tests/test_detector.py::test_exported_models_score_alike_for_any_batch[{name}]"
           for name in ("vectors-CSD", "bytes-LastLayerGP")]  # fmt: skip
LAPLACE = ["tests/test_methods.py::test_laplace_of_biases_alone_is_the_textbooks"]
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
             "tests/test_cli.py::test_the_table_marks_the_best_of_each_column"],
    "matplotlib": [*PAGES, "tests/test_cli.py::test_the_plane_is_drawn_on_one_scale"],
    "jinja2": PAGES,
    "pillow": ["tests/test_sources.py"],
    "pooch": ["tests/test_data_sets.py"],
    "requests": ["tests/test_data_sets.py"],
    **dict.fromkeys(("tqdm", "opt-einsum", "torchmetrics", "einops", "unfoldnd", "einconv", "linear-operator",
                     "asdfghjkl"), LAPLACE),
    "posteriors": ["tests/test_sgmcmc.py::test_a_killed_fit_goes_on_as_if_nothing_had_happened[baoa]"],
    **dict.fromkeys(("onnx", "onnxscript", "onnxruntime"), EXPORTS),
    "ray": ["tests/test_bench.py::test_ray_goes_on_when_a_node_is_lost"],
    "av": ["tests/test_runs.py::test_an_mp4_has_the_games_speed_and_holds_the_last_frame"],
    "vizdoom": ["tests/test_doom.py"],
    "stable-baselines3": ["tests/test_sb3.py"],
    "gymnasium": ["tests/test_doom.py", "tests/test_small_envs.py", "tests/test_bonus.py"],
    "tensorboard": ["tests/test_stopped_runs.py::test_resuming_removes_later_points_from_tensorboard"],
    "optuna": ["tests/test_bench.py::test_a_search_tries_every_value_once_and_goes_on_with_the_best"],
    "pyarrow": ["tests/test_sources.py"],
}  # fmt: skip
LONG = CHECKS["ray"]  # marked slow, and wanted all the same


@dataclass(frozen=True)
class Cell:
    python: str
    versions: str
    outcome: str  # passed, failed, not installed, not run
    detail: str
    torch: str = "–"
    seconds: float = 0.0

    def row(self) -> str:
        took = f"{self.seconds:.0f} s" if self.seconds else "–"
        return f"| {self.python} | {self.versions} | {self.torch} | {self.outcome} | {took} | {self.detail} |"


class InstallError(Exception):
    """pip's own words for why an environment cannot be made."""


def project() -> dict[str, list[str]]:
    """Requirements by extra; those of every user under ''."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return {"": table["dependencies"], **table["optional-dependencies"]}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: Sequence[str]) -> list[str]:
    return [normal(found.group()) for text in requirements if (found := re.match(r"[A-Za-z0-9._-]+", text))]


def lowest(requirements: Sequence[str]) -> list[str]:
    """`name>=1.2` as `name==1.2`; what has no lower bound is left to pip."""
    bounds = (re.match(r"([A-Za-z0-9._-]+)(?:\[.*?\])?\s*>=\s*([0-9][0-9a-z.]*)", text) for text in requirements)
    return [f"{normal(bound.group(1))}=={bound.group(2)}" for bound in bounds if bound]


def interpreter(version: str) -> Path | None:
    """A Python of this version that starts: on the path, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    known = [shutil.which(f"python{version}"), *sorted(map(str, pyenv.glob(f"{version}.*/bin/python{version}")))]
    ask = "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"
    for path in filter(None, known):
        done = subprocess.run([path, "-c", ask], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip() == version:
            return Path(path)
    return None


def run(command: Sequence[str | Path], log: Path, limit: float) -> tuple[int, str]:
    """Exit code and output of a command; the output goes to the log, too."""
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
    """onefold as users get it (not editable), every extra but the site's, and what the tests need."""
    wanted = project()
    extras = [extra for extra in wanted if extra and extra not in APART]
    constraints = work / f"{versions}.txt"
    texts = [text for extra in ("", *extras) for text in wanted[extra]]
    constraints.write_text("\n".join(lowest(texts) if versions == "lowest" else []) + "\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints]
    bare = [f"{name}=={version}" if versions == "lowest" else name for name, version in BARE.items()]
    steps: list[list[str | Path]] = [[*pip, f"{ROOT}[{','.join(extras)}]", *TOOLS], [*pip, "--no-deps", *bare]]
    if torch_index:
        steps.insert(0, [*pip, "torch", "--index-url", torch_index])
    for step in steps:
        code, said = run(step, log, 3600)
        if code:
            errors = [line for line in said.splitlines() if line.startswith("ERROR:")] or said.splitlines()[-1:]
            raise InstallError(errors[0].removeprefix("ERROR: ").strip() if errors else f"pip ended with {code}")


def tried(python: Path, log: Path) -> tuple[bool, str]:
    """Whether the quick part of the tests passes, and how much of it there was."""
    every = dict.fromkeys(name for tests in CHECKS.values() for name in tests if name not in LONG)
    # Old dependencies warn of new ones and the other way about: here only failures count.
    pytest = [python, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", "-W", "default", "--durations=0"]
    good, said = True, []
    for arguments in (["-m", "not slow", *every], LONG):
        code, output = run([*pytest, *arguments], log, 1800)
        last = next(
            (line for line in reversed(output.splitlines()) if re.search(r"\d+ (passed|failed|error)", line)), ""
        )
        failures = [
            found.group(1) for found in re.finditer(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", output, re.MULTILINE)
        ]
        good = good and code == 0
        more = [f"and {len(failures) - 5} more"] if len(failures) > 5 else []
        counts = re.sub(r" in [\d.]+s.*|, \d+ warnings?|=+ ?", "", last) or f"pytest ended with {code}"
        said += [counts, *failures[:5], *more]
    return good, "; ".join(said)


def versions_of(python: Path) -> dict[str, str]:
    done = subprocess.run([python, "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=False)
    return {normal(entry["name"]): entry["version"] for entry in json.loads(done.stdout or "[]")}


def cell(version: str, versions: str, options: argparse.Namespace) -> Cell:
    """One environment from nothing to its verdict."""
    found = interpreter(version)
    if found is None:
        return Cell(version, versions, "not run", f"no Python {version} with pip on this machine")
    work: Path = options.folder / f"{version}-{versions}"
    log: Path = options.folder / f"{version}-{versions}.log"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    log.write_text("")
    start = time.monotonic()
    try:
        code, said = run([found, "-m", "venv", work / "env"], log, 300)
        if code:
            return Cell(version, versions, "not installed", said.strip().splitlines()[-1])
        python = work / "env" / "bin" / "python"
        try:
            install(python, versions, work, log, options.torch_index)
        except InstallError as error:
            return Cell(version, versions, "not installed", str(error))
        installed = versions_of(python)
        log.with_suffix(".json").write_text(json.dumps(installed, indent=1) + "\n")
        good, said = tried(python, log)
        outcome = "passed" if good else "failed"
        return Cell(version, versions, outcome, said, installed.get("torch", "–"), time.monotonic() - start)
    finally:
        if not options.keep:
            shutil.rmtree(work, ignore_errors=True)


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    for version in options.python:
        for versions in options.versions:
            print(f"Python {version}, {versions} versions …", file=sys.stderr, flush=True)
            yield cell(version, versions, options)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", nargs="+", default=PYTHONS, choices=PYTHONS)
    parser.add_argument("--versions", nargs="+", default=("lowest", "newest"), choices=("lowest", "newest"))
    parser.add_argument("--folder", type=Path, default=ROOT / "out" / "matrix", help="environments and logs")
    parser.add_argument("--torch-index", help="an index with a torch for CPUs alone")
    parser.add_argument("--keep", action="store_true", help="leave the environments where they are")
    options = parser.parse_args(arguments)
    options.folder = options.folder.resolve()
    table = list(cells(options))
    print("| Python | versions | torch | outcome | took | tests |\n|---|---|---|---|---|---|")
    print("\n".join(one.row() for one in table))
    if not any(one.outcome in ("passed", "failed") for one in table):
        print("nothing could be run here", file=sys.stderr)
        return 1
    return int(any(one.outcome in ("failed", "not installed") for one in table))


if __name__ == "__main__":
    raise SystemExit(main())
