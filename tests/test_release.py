"""The release: one place for the version, metadata that resolve, a wheel that works without the repository."""

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import onefold

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
VERSION = re.compile(rf"(?<![\w.]){re.escape(onefold.__version__)}(?![\w.])")
DATED = ("test_shift_report.py", "test_runs_report.py", "comparison.md")  # of some version, and stay so


def matrix() -> Any:
    path = ROOT / "tools" / "matrix.py"
    spec = importlib.util.spec_from_file_location("matrix", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["matrix"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- one place for the version ----------------------------------------------------------------------------------------


def test_the_version_is_written_once() -> None:
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    folders = [ROOT / name for name in ("src", "tests", "tools", "benchmarks", "docs")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md", ".j2", ".toml")]
    files += [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), *ROOT.glob("*.yml"), ROOT / "Makefile"]
    places = [path for path in files if path.name not in DATED and VERSION.search(path.read_text("utf-8"))]
    assert [path.relative_to(ROOT) for path in places if path.name != "CHANGELOG.md"] == [
        Path("src/onefold/__init__.py")
    ]


def test_the_citation_is_of_this_version_and_of_the_paper() -> None:
    text = (ROOT / "CITATION.cff").read_text("utf-8")
    assert re.findall(r"^version: (\S+)$", text, re.MULTILINE) == [onefold.__version__]
    wanted = "Contextual Similarity Distillation: Ensemble Uncertainties with a Single Model"
    assert f'title: "{wanted}"' in text
    assert re.findall(r"^ +- family-names: (.+)$", text, re.MULTILINE) == [
        "Zanger", "Van der Vaart", "Böhmer", "Spaan",
    ]  # fmt: skip


def test_the_changelog_has_an_entry_for_this_version() -> None:
    first = re.search(r"^## (\S+)(?: \((.+)\))?$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert first is not None
    version = Version(onefold.__version__)
    assert first[1] == version.base_version
    assert (first[2] == "unreleased") == version.is_devrelease
    assert version.is_devrelease or re.fullmatch(r"\d{4}-\d\d-\d\d", first[2])


def test_every_test_named_in_the_security_policy_exists() -> None:
    named = re.findall(r"`(test_\w+)`", (ROOT / "SECURITY.md").read_text("utf-8"))
    existing = {
        name
        for path in (ROOT / "tests").glob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text("utf-8"))
    }
    assert len(named) > 20
    assert set(named) - existing == set()


def test_a_run_cannot_name_a_module_to_import() -> None:
    """Gymnasium would import what stands before the colon; a run's folder can come from a stranger."""
    registry = pytest.importorskip("onefold.rl.registry", exc_type=ImportError)
    for name in ("antigravity:CartPole-v1", "antigravity:Any-v0"):
        with pytest.raises(onefold.OnefoldError, match="its module is not imported"):
            registry.find_environment(name, 1000)
    assert "antigravity" not in sys.modules


# --- metadata ---------------------------------------------------------------------------------------------------------


def test_every_extra_is_made_of_requirements_that_are_met_here() -> None:
    """An extra outside of `dev` need not be installed where the tests run."""
    (itself,) = (Requirement(text) for text in EXTRAS["dev"] if text.startswith("onefold["))
    assert itself.extras <= set(EXTRAS)
    for extra, texts in {"": PROJECT["dependencies"], **EXTRAS}.items():
        for requirement in map(Requirement, texts):
            if requirement.name == "onefold":
                continue
            assert requirement.specifier, f"{requirement} of {extra!r} has no bound"
            if extra in ("", "dev", *itself.extras):
                assert requirement.specifier.contains(distribution(requirement.name).version, prereleases=True)


def test_every_error_names_an_extra_that_exists() -> None:
    """`pip install 'onefold[…]'` in an error or on a page of ours does what it says."""
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    named = {
        (path.name, extra.strip())
        for path in files
        for extras in re.findall(r"onefold\[([\w, ]+)\]", path.read_text("utf-8"))
        for extra in extras.split(",")
    }
    assert {extra for _, extra in named} >= {"laplace", "mcmc", "onnx", "ray", "rl", "search", "tables"}
    assert {(name, extra) for name, extra in named if extra not in EXTRAS} == set()


def test_packages_without_dependencies_are_the_same_everywhere() -> None:
    """laplace-torch is installed without its dependencies: the command, the matrix and the versions here agree."""
    command = re.search(r"`pip install --no-deps ([^`]+)`", (ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    assert command is not None
    pinned = dict(text.split("==") for text in command[1].split())
    assert pinned == matrix().WITHOUT_DEPENDENCIES
    assert pinned == {name: distribution(name).version for name in pinned}
    listed = {
        Requirement(text).name for name in pinned for text in distribution(name).requires or [] if ";" not in text
    }
    ours = {canonicalize_name(Requirement(text).name) for text in [*PROJECT["dependencies"], *EXTRAS["laplace"]]}
    assert {canonicalize_name(name) for name in listed} - ours - set(pinned) == {"torchvision"}


def test_the_matrix_tries_every_dependency_by_tests_that_exist() -> None:
    tool = matrix()
    users = {"": PROJECT["dependencies"]} | {
        extra: EXTRAS[extra] for extra in EXTRAS if extra not in tool.EXTRAS_OF_DEVELOPERS
    }
    assert set(tool.CHECKS) == {name for texts in users.values() for name in tool.names(texts)}
    for check in {check for checks in tool.CHECKS.values() for check in checks}:
        path, _, name = check.partition("::")
        assert not name or f"\ndef {name.partition('[')[0]}(" in (ROOT / path).read_text("utf-8"), check


def test_lowest_versions_are_the_lower_bounds() -> None:
    tool = matrix()
    texts = ["torch>=2.11", "unfoldNd>=0.2.3,<1", "vizdoom==1.3.2", "pyright[nodejs]>=1.1.390", "a_b.c >= 1"]
    assert tool.lowest(texts) == ["torch==2.11", "unfoldnd==0.2.3", "pyright==1.1.390", "a-b-c==1"]
    assert tool.names(texts) == ["torch", "unfoldnd", "vizdoom", "pyright", "a-b-c"]
    assert len(tool.lowest(PROJECT["dependencies"])) == len(PROJECT["dependencies"])


# --- workflows --------------------------------------------------------------------------------------------------------

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def parse_yaml(path: Path) -> dict[Any, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return yaml.safe_load(path.read_text("utf-8"))


def jobs_of(name: str) -> dict[str, Any]:
    return parse_yaml(ROOT / ".github" / "workflows" / name)["jobs"]


def test_workflows_call_what_exists() -> None:
    assert {path.name for path in WORKFLOWS} == {"ci.yml", "release.yml"}
    for path in WORKFLOWS:
        for job in parse_yaml(path)["jobs"].values():
            assert job["steps"], path.name
            for step in job["steps"]:
                assert ("run" in step) != ("uses" in step), step
                words = step.get("run", "").split()
                if words[:1] == ["make"]:
                    assert set(words[1:]) <= TARGETS, step
                elif words and words[0].startswith("."):
                    assert os.access(ROOT / words[0], os.X_OK), step


def test_ci_runs_the_same_script_on_every_supported_python() -> None:
    test = jobs_of("ci.yml")["test"]
    assert ".ci/run" in [step.get("run") for step in test["steps"]]
    supported = {text.rpartition(" ")[2] for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)}
    assert set(test["strategy"]["matrix"]["python"]) == supported == set(matrix().PYTHONS)


def test_releases_are_published_on_a_tag_without_a_stored_password() -> None:
    workflow = parse_yaml(ROOT / ".github" / "workflows" / "release.yml")
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads "on" as true
    publish = workflow["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["environment"] == "pypi"
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
    assert [step["uses"].partition("@")[0] for step in publish["steps"]][-1] == "pypa/gh-action-pypi-publish"


def test_pre_commit_runs_the_linter_and_the_type_checker() -> None:
    config = parse_yaml(ROOT / ".pre-commit-config.yaml")
    hooks = {hook["id"]: hook["entry"].split()[0] for repo in config["repos"] for hook in repo["hooks"]}
    assert hooks == {"ruff-format": ".venv/bin/ruff", "ruff-check": ".venv/bin/ruff", "pyright": ".venv/bin/pyright"}


def test_project_urls_are_one_marked_placeholder_or_real() -> None:
    hosts = {url.split("/")[2] for url in PROJECT["urls"].values()}
    assert len(hosts) == 1
    marked = "# PLACEHOLDER" in (ROOT / "pyproject.toml").read_text("utf-8")
    assert marked == (hosts == {"example.invalid"})


# --- the files --------------------------------------------------------------------------------------------------------


def built(source: Path, folder: Path, *kinds: str) -> list[Path]:
    command = [sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", str(folder), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A wheel and an sdist of the working tree; `make build` gives the same."""
    wheel, sdist = built(ROOT, tmp_path_factory.mktemp("dist"), "--wheel", "--sdist")
    assert wheel.suffix == ".whl"
    return wheel, sdist


def content(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel_and_has_what_its_tests_need(files: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, sdist = files
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    (again,) = built(source, tmp_path / "dist", "--wheel")
    assert again.name == wheel.name
    assert content(again) == content(wheel)
    for name in ("LICENSE", "CITATION.cff", "SECURITY.md", "Makefile", "constraints.txt", "results/demo.json",
                 "tests/golden/ntk.json", "tools/matrix.py", "docs/images/toy_2d.png"):  # fmt: skip
        assert (source / name).is_file(), name
    assert not [path for path in source.rglob("*") if path.name in ("__pycache__", "out", ".venv", ".git")]


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package_and_nothing_else(files: tuple[Path, Path]) -> None:
    package = ROOT / "src"
    ours = {path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    names = {name for name in content(files[0]) if ".dist-info/" not in name}
    assert names == {str(path.relative_to(package)) for path in ours}
    assert "onefold/py.typed" in names
    assert {Path(name).suffix for name in names} >= {".py", ".j2", ".css", ".js"}


@pytest.mark.slow
def test_its_metadata_are_valid(files: tuple[Path, Path]) -> None:
    wheel, sdist = files
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        raw = archive.read(name)
    with tarfile.open(sdist) as archive:
        member = archive.extractfile(f"onefold-{onefold.__version__}/PKG-INFO")
        assert member is not None
        assert member.read() == raw
    metadata = Metadata.from_email(raw, validate=True)
    assert (metadata.name, str(metadata.version)) == ("onefold", onefold.__version__)
    assert metadata.license_expression == "MIT"
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (ROOT / "README.md").read_text("utf-8")
    assert set(metadata.provides_extra or ()) == set(EXTRAS)
    assert str(metadata.requires_python) == PROJECT["requires-python"]


# --- an empty environment ---------------------------------------------------------------------------------------------


def closure(requirements: list[str]) -> Iterator[Distribution]:
    """What pip would install for them, out of what is installed here."""
    waiting, seen = [Requirement(text) for text in requirements], set()
    while waiting:
        requirement = waiting.pop()
        key = (canonicalize_name(requirement.name), *sorted(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        installed = distribution(requirement.name)
        yield installed
        for needed in map(Requirement, installed.requires or []):
            extras = requirement.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(needed)


def borrow(site: Path, requirements: list[str]) -> None:
    """Links to exactly those packages: what is not declared cannot be imported, and torch is not copied."""
    for one in closure(requirements):
        for top in {Path(str(file)).parts[0] for file in one.files or []} - {"..", "__pycache__"}:
            target, link = Path(str(one.locate_file(top))), site / top
            if not link.exists():
                link.symlink_to(target)


@pytest.fixture(scope="module")
def environment(files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and its dependencies; nothing in it knows of the repository."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, with_pip=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, files[0]], check=True, cwd=folder)
    borrow(site_of(folder), PROJECT["dependencies"])
    (folder / "work").mkdir()
    x = np.random.default_rng(0).normal(size=(160, 4)).round(3)
    rows = "\n".join(",".join(map(str, row)) for row in x)
    (folder / "work" / "rows.csv").write_text(f"a,b,c,d\n{rows}\n")
    return folder


def site_of(folder: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))


def run_in(environment: Path, *command: str, status: int = 0) -> str:
    """Output of a command of that environment, run in a folder of its own."""
    program, *arguments = command
    variables = {"PATH": f"{environment / 'bin'}:/usr/bin:/bin", "HOME": str(environment), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [environment / "bin" / program, *arguments],
        cwd=environment / "work", env=variables, capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


IMPORT_ALL = """
import importlib, json, pkgutil, onefold
from onefold.errors import MissingExtraError
missing = {}
for module in pkgutil.walk_packages(onefold.__path__, "onefold.", onerror=lambda _: None):
    try:
        importlib.import_module(module.name)
    except MissingExtraError as error:
        missing[module.name] = str(error)
print(json.dumps([onefold.__file__, onefold.__version__, missing]))
"""


@pytest.mark.slow
def test_every_module_imports_or_names_its_extra(environment: Path) -> None:
    """With the declared dependencies alone: an import that nothing declares would end this with a traceback."""
    file, version, missing = json.loads(run_in(environment, "python", "-c", IMPORT_ALL).splitlines()[-1])
    assert Path(file).is_relative_to(environment)
    assert version == onefold.__version__
    assert all(re.search(r"pip install ['\"]onefold\[\w+\]", message) for message in missing.values()), missing
    optional = ("onefold.rl", "onefold.report.runs_", "onefold.serve.", "onefold.integrations.mlflow")
    assert all(name.startswith(optional) for name in missing), missing


@pytest.mark.slow
def test_fit_score_diagnose_and_export_work_in_the_wheel(environment: Path) -> None:
    assert run_in(environment, "onefold", "--version") == f"onefold {onefold.__version__}\n"
    assert "demo" in run_in(environment, "onefold", "--help")
    run_in(environment, "onefold", "fit", "rows.csv", "-o", "m.onefold", "--method", "gp")
    run_in(environment, "onefold", "score", "m.onefold", "rows.csv", "-o", "s.csv", "--report", "p.html")
    assert len((environment / "work" / "s.csv").read_text().splitlines()) == 161
    page = (environment / "work" / "p.html").read_text("utf-8")
    assert "Content-Security-Policy" in page
    assert "</html>" in page
    run_in(environment, "onefold", "export", "m.onefold", "m.pt2")
    output = run_in(environment, "onefold", "export", "m.onefold", "m.onnx", status=2)
    assert re.fullmatch(r"onefold: [^\n]*pip install ['\"]onefold\[onnx\]['\"][^\n]*\n", output), output
    borrow(site_of(environment), EXTRAS["onnx"])
    run_in(environment, "onefold", "export", "m.onefold", "m.onnx")
    ask = "import onnxruntime; print([i.name for i in onnxruntime.InferenceSession('m.onnx').get_outputs()])"
    assert run_in(environment, "python", "-c", ask).splitlines()[-1] == "['score', 'pvalue', 'is_ood']"


@pytest.mark.slow
def test_a_benchmark_is_run_and_reported_in_the_wheel(environment: Path) -> None:
    run_in(environment, "onefold", "bench", "run", "-o", "b", "--preset", "smoke", "--methods", "last_layer_gp", "knn")
    run_in(environment, "onefold", "report", "b")
    assert list((environment / "work" / "b").rglob("*.html"))
    output = run_in(environment, "onefold", "rl", "train", "-o", "r", "--env", "chain-8", "--frames", "100", status=2)
    assert re.fullmatch(r"onefold: [^\n]*pip install ['\"]onefold\[rl\]['\"][^\n]*\n", output), output


SHORT_DEMO = """
import dataclasses, sys
from onefold import cli, demo
demo.RECIPE = dataclasses.replace(demo.RECIPE, steps=20, warmup=2)
demo.CLASSIFIER_RECIPE = dataclasses.replace(demo.CLASSIFIER_RECIPE, steps=20)
sys.exit(cli.main(["demo", "--out", "demo"]))
"""


@pytest.mark.slow
def test_the_demo_works_in_the_wheel(environment: Path) -> None:
    """With fewer steps: its data, table and page are all in the wheel and its dependencies."""
    assert "LastLayerGP" in run_in(environment, "python", "-c", SHORT_DEMO)
    methods = json.loads((environment / "work" / "demo" / "results.json").read_text())["methods"]
    assert set(methods) == {"CSD", "CSD-Aug", "LastLayerGP", "RND", "ENS(5)"}
    assert "</html>" in (environment / "work" / "demo" / "index.html").read_text("utf-8")
