"""Contracts between packages, public names, what entry points load, and no pickle."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import onefold
from onefold import data, distil, exact, kernels, metrics, rl
from onefold.nn.train import Recipe

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "onefold"
MODULES = sorted(SOURCE.rglob("*.py"))

# A package imports only from itself and from those before it in this list.
PACKAGES = [
    "errors", "decode", "types", "metrics", "core", "monitor", "serve", "nn", "inputs", "kernels", "exact", "distil",
    "detectors", "data", "bench", "rl", "toy", "demo", "report", "integrations", "sklearn", "cli",
]  # fmt: skip

PUBLIC = {
    onefold: {
        "CSD", "DeepEnsemble", "Energy", "KNN", "Laplace", "LastLayerGP", "LocalGP", "MCDropout", "Monitor",
        "OnefoldError", "RND", "SGMCMC", "__version__", "choose_detector", "data", "distil", "exact", "kernels", "load",
        "metrics", "rl", "sklearn",
    },
    kernels: {
        "EmpiricalNTK", "Features", "InfiniteMLP", "KernelPair", "ModelFeatures", "ModelOutputs", "empirical_ntk",
        "from_model", "from_pretrained", "infinite", "last_layer", "logits",
    },
    exact: {"Gram", "Law", "PrimalGP", "local_bandwidth", "local_variance", "ntk_gp", "reference_ensemble"},
    distil: {
        "Architecture", "AugmentedContexts", "Chain", "CopiedContexts", "ExtraContexts", "Mixture", "PairKernel",
        "Similarity", "TrainContexts", "all_pairs", "augment", "contextual_limit", "distil_known_queries",
        "distillation", "similarity_loss", "similarity_model",
    },
    data: {"Digits", "ImageSet", "data_dir", "digits", "fetch", "letters", "perturb", "read_set", "read_texts"},
    metrics: {
        "RiskCoverage", "accuracy", "aupr_in", "aupr_out", "auroc", "fpr95", "rank_correlation", "risk_coverage",
    },
    rl: {
        "Agent", "CSDBonus", "IntrinsicReward", "LastLayerGPBonus", "LinearSchedule", "RNDBonus", "make_run", "resume",
        "train",
    },
}  # fmt: skip


def package_of(module: str) -> int:
    return PACKAGES.index(module.split(".")[1])


def imports(path: Path) -> set[str]:
    """Return the modules of onefold that a file imports anywhere in it."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "onefold":
            modules |= {f"onefold.{alias.name}" for alias in node.names if alias.name in PACKAGES}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
    return {name for name in modules if name.startswith("onefold.")}


def test_every_module_is_in_a_package_of_the_list() -> None:
    names = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in MODULES} - {"__init__"}
    assert names == set(PACKAGES)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_packages_import_only_from_packages_before_them(path: Path) -> None:
    if path == SOURCE / "__init__.py":
        return
    position = PACKAGES.index(path.relative_to(SOURCE).parts[0].removesuffix(".py"))
    later = {name for name in imports(path) if package_of(name) > position}
    assert not later, f"{path.relative_to(SOURCE)} imports from packages after its own: {later}"


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_public_names_are_pinned(module: ModuleType) -> None:
    assert set(module.__all__) == PUBLIC[module]
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = onefold.nothing  # pyright: ignore[reportAttributeAccessIssue]


def loaded(code: str, **keywords: Any) -> set[str]:
    """Return the modules that a script loads in a fresh process."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    environment = {**os.environ, "JAXTYPING_DISABLE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, **keywords)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def ours(modules: set[str]) -> list[str]:
    return sorted(name for name in modules if name.split(".")[0] == "onefold")


HELP = """
from onefold.cli import main
try:
    main([{arguments}"--help"])
except SystemExit:
    pass
"""


@pytest.mark.parametrize(
    "code",
    [
        "import onefold",
        "import onefold.cli",
        "import onefold.detectors.registry",
        HELP.format(arguments=""),
        HELP.format(arguments="'fit', "),
        HELP.format(arguments="'rl', 'train', "),
    ],
)
def test_imports_and_help_load_neither_torch_nor_numpy(code: str) -> None:
    assert not loaded(code) & {"torch", "numpy", "scipy", "sklearn", "matplotlib", "pandas", "jinja2"}


def test_bonuses_load_few_modules() -> None:
    modules = loaded("import onefold.rl.bonus")
    assert len(ours(modules)) <= 25, ours(modules)
    assert not modules & {"pyarrow", "onnx", "posteriors", "sklearn", "scipy", "gymnasium", "PIL"}
    assert not re.search("csv|parquet|onnx|export|sgmcmc|langevin", " ".join(ours(modules)))


@pytest.mark.filterwarnings("ignore")
def test_rl_train_loads_few_modules(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium", reason="Gymnasium is not installed")
    options = ["--agent", "csd", "--env", "chain-8", "--frames", "64", "--device", "cpu"]
    code = f"from onefold.cli import main; assert main(['rl', 'train', '-o', 'run', *{options}]) == 0"
    modules = loaded(code, cwd=tmp_path)
    assert len(ours(modules)) <= 60, ours(modules)
    assert not re.search("table_files|parquet|sgmcmc|langevin|report|bench", " ".join(ours(modules)))


def test_scoring_an_image_loads_neither_the_compiler_nor_scikit_learn(tmp_path: Path) -> None:
    """These libraries take seconds to load. `benchmarks/startup.py` measures the time."""
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8)
    np.save(tmp_path / "x.npy", images)
    recipe = Recipe(steps=2, batch=8)
    onefold.CSD(recipe=recipe, device="cpu").fit(images).calibrate(images, fpr=0.1).save(tmp_path / "m.onefold")
    np.save(tmp_path / "one.npy", images[:1])
    code = "from onefold.cli import main; assert main(['score', 'm.onefold', 'one.npy', '-o', 's.csv']) == 0"
    heavy = {"torch._dynamo", "sympy", "sklearn", "scipy", "pandas", "matplotlib", "jinja2", "onnx"}
    assert not loaded(code, cwd=tmp_path) & heavy


def test_nothing_is_pickled() -> None:
    forbidden = re.compile(r"\bpickle\b|torch\.(save|load)\(|np\.load\(|joblib|weights_only")
    offenders = [path.name for path in MODULES if forbidden.search(path.read_text("utf-8"))]
    assert [name for name in offenders if name != "storage.py"] == []
    code = "\n".join(
        line for line in (SOURCE / "core" / "storage.py").read_text("utf-8").splitlines() if '"""' not in line
    )
    assert not forbidden.search(code)


# --- tools/structure.py -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def structure() -> Any:
    spec = importlib.util.spec_from_file_location("structure", ROOT / "tools" / "structure.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["structure"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_structure_counts_vague_and_private_names(structure: Any) -> None:
    code = "def f(found, x):\n    own_ = x\n    for known in x: pass\n    return other._secret\n"
    other = "class A:\n    def __init__(self):\n        self._secret = self._mine = 1\n"
    trees = {SOURCE / "core" / "a.py": ast.parse(code), SOURCE / "nn" / "b.py": ast.parse(other)}
    vague, _ = structure.vague_names(trees)
    assert sorted(place.name for place in vague) == ["found", "known", "own_"]
    assert [place.name for place in structure.private_accesses(trees)] == ["other._secret"]
    imported = {SOURCE / "core" / "a.py": ast.parse("from onefold.detectors._members import Members\n")}
    assert [place.name for place in structure.private_accesses(imported)] == ["onefold.detectors._members"]


def test_structure_finds_undocumented_arguments(structure: Any) -> None:
    def function(x: int, y: int) -> int:
        """Return a sum.

        Args:
            x: First.
        """
        return x + y

    assert structure.undocumented(function) == ["y", "Returns"]
