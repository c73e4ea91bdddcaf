"""Project-wide rules: import layers, public names, import cost, no pickle."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import onefold

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "onefold"
MODULES = sorted(SOURCE.rglob("*.py"))

# From the ground up: a module imports only from its own floor or from floors before it.
FLOORS = [
    "errors", "arguments", "types", "memory", "inputs", "metrics", "fused", "nets", "store", "signals", "streams",
    "cudnn", "train", "obabo", "sources", "reader", "reservoir", "samples", "alarm", "diagnosis", "kernels", "exact",
    "distil", "export", "fitted", "detector", "methods", "files", "sklearn", "data", "provenance", "bench", "rl", "toy",
    "demo", "report", "progress", "programs", "jobs", "cli",
]  # fmt: skip


def floor(module: str) -> int:
    return FLOORS.index(module.split(".")[1])


def imports(path: Path) -> set[str]:
    """Modules of onefold that a file imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "onefold":
            found |= {f"onefold.{alias.name}" for alias in node.names if alias.name in FLOORS}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {name for name in found if name.startswith("onefold.")}


def test_every_module_has_a_floor() -> None:
    names = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in MODULES} - {"__init__"}
    assert names == set(FLOORS)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    if path == SOURCE / "__init__.py":
        return
    own = FLOORS.index(path.relative_to(SOURCE).parts[0].removesuffix(".py"))
    above = {name for name in imports(path) if floor(name) > own}
    assert not above, f"{path.name} imports from floors above its own: {above}"


def test_public_names_are_pinned() -> None:
    assert set(onefold.__all__) == {
        "CSD", "DeepEnsemble", "Energy", "KNN", "Laplace", "LastLayerGP", "MCDropout", "OnefoldError", "RND", "SGMCMC",
        "__version__", "exact", "kernels", "load",
    }  # fmt: skip
    for name in onefold.__all__:
        assert getattr(onefold, name) is not None
    assert set(onefold.kernels.__all__) == {
        "EmpiricalNTK", "Features", "InfiniteMLP", "ModelFeatures", "empirical_ntk", "from_model", "infinite",
        "last_layer", "logits",
    }  # fmt: skip
    assert set(onefold.exact.__all__) == {"Gram", "Law", "PrimalGP", "ntk_gp", "reference_ensemble"}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = onefold.nothing  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("statement", ["import onefold", "import onefold.cli"])
def test_importing_costs_little(statement: str) -> None:
    heavy = "[m for m in ('torch', 'numpy', 'sklearn', 'matplotlib') if m in sys.modules]"
    code = f"import sys; {statement}; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_scoring_an_image_loads_neither_the_compiler_nor_scikit_learn(tmp_path: Path) -> None:
    """They take seconds, and one image takes milliseconds."""
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8)
    np.save(tmp_path / "x.npy", images)
    recipe = onefold.train.Recipe(steps=2, batch=8)
    onefold.CSD(recipe=recipe, device="cpu").fit(images).calibrate(images, fpr=0.1).save(tmp_path / "m.onefold")
    np.save(tmp_path / "one.npy", images[:1])
    code = (
        "import sys; from onefold.cli import main; assert main(['score', 'm.onefold', 'one.npy', '-o', 's.csv']) == 0;"
        "heavy = ('torch._dynamo', 'sympy', 'sklearn', 'scipy', 'pandas', 'matplotlib', 'jinja2', 'onnx');"
        "print([name for name in heavy if name in sys.modules])"
    )
    environment = {**os.environ, "JAXTYPING_DISABLE": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    assert done.stdout.splitlines()[-1] == "[]"


def test_nothing_is_pickled() -> None:
    forbidden = re.compile(r"\bpickle\b|torch\.(save|load)\(|np\.load\(|joblib|weights_only")
    offenders = [path.name for path in MODULES if forbidden.search(path.read_text("utf-8"))]
    assert [name for name in offenders if name != "store.py"] == []
    code = "\n".join(line for line in (SOURCE / "store.py").read_text("utf-8").splitlines() if '"""' not in line)
    assert not forbidden.search(code)
