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
from onefold.nn.train import Recipe

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "onefold"
MODULES = sorted(SOURCE.rglob("*.py"))

# A module imports only from its own package and from those before it in this list.
LAYERS = [
    "errors", "types", "metrics", "core", "nn", "inputs", "kernels", "exact", "distil", "detectors", "data", "bench",
    "rl", "toy", "demo", "report", "integrations", "sklearn", "cli",
]  # fmt: skip


def layer(module: str) -> int:
    return LAYERS.index(module.split(".")[1])


def imports(path: Path) -> set[str]:
    """Return the modules of onefold that a file imports anywhere in it."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "onefold":
            modules |= {f"onefold.{alias.name}" for alias in node.names if alias.name in LAYERS}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
    return {name for name in modules if name.startswith("onefold.")}


def test_every_module_is_in_a_layer() -> None:
    names = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in MODULES} - {"__init__"}
    assert names == set(LAYERS)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    if path == SOURCE / "__init__.py":
        return
    position = LAYERS.index(path.relative_to(SOURCE).parts[0].removesuffix(".py"))
    above = {name for name in imports(path) if layer(name) > position}
    assert not above, f"{path.relative_to(SOURCE)} imports from layers above its own: {above}"


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
    recipe = Recipe(steps=2, batch=8)
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
    assert [name for name in offenders if name != "storage.py"] == []
    code = "\n".join(
        line for line in (SOURCE / "core" / "storage.py").read_text("utf-8").splitlines() if '"""' not in line
    )
    assert not forbidden.search(code)
