"""Count what the structure of the package is judged by, and say where it is found.

    python tools/structure.py            # the counts
    python tools/structure.py --list     # and every place
    python tools/structure.py --docs     # and callables of the site whose docs explain every argument (needs torch)
    python tools/structure.py --stacks   # and the deepest stack of our own frames in fit, score and load (needs torch)

Counted: names that say nothing, accesses to private names of other modules, record types of the benchmark, modules and
lines, and modules that two commands load.
"""

import argparse
import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "onefold"
VAGUE = {
    "found", "own", "said", "given", "known", "there", "aside", "told", "judged", "hopes", "bury", "hire", "staff",
    "apart", "untried", "news", "glimpse", "whose",
}  # fmt: skip
NAMED_TUPLE = {"_asdict", "_replace", "_fields"}  # public, whatever their names look like
RECORDS = ("dataclass", "NamedTuple", "TypedDict")


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield every name that a module defines: locals, parameters, attributes, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield (node.id if isinstance(node, ast.Name) else node.attr), node.lineno


def vague_names() -> tuple[list[str], int]:
    places, total = [], 0
    for path in modules():
        for name, line in names(ast.parse(path.read_text("utf-8"))):
            total += 1
            if name.strip("_") in VAGUE:
                places.append(f"{path.relative_to(ROOT)}:{line}: {name}")
    return places, total


def private_accesses() -> list[str]:
    """Uses of `_name` of an imported module or of an object that is neither self nor cls nor made in this module."""
    places = []
    for path in modules():
        tree = ast.parse(path.read_text("utf-8"))
        local = {name for name, _ in names(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onefold"):
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                places += [f"{path.relative_to(ROOT)}:{node.lineno}: {name}" for name in private]
            if not (isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")):
                continue
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner not in ("self", "cls", "torch", "os", "sys") and node.attr not in {*local, *NAMED_TUPLE}:
                places.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    return places


def record_types() -> list[str]:
    """Dataclasses, named tuples and typed dicts of the benchmark and its report."""
    places = []
    for path in [*SOURCE.glob("bench/*.py"), *SOURCE.glob("report/*.py")]:
        if path.parent.name == "report" and not path.stem.startswith(
            ("shift", "seeds", "paper", "bench", "stats", "tables")
        ):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                marks = " ".join(ast.unparse(part) for part in [*node.decorator_list, *node.bases])
                if any(record in marks for record in RECORDS):
                    places.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}")
    return places


def loaded(statement: str) -> int:
    """Return how many modules of onefold a statement loads in a fresh process."""
    code = f"import sys\n{statement}\nprint(sum(name.split('.')[0] == 'onefold' for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def stacks() -> dict[str, int]:
    """Return the deepest stack of frames in src/onefold of three verbs."""
    import tempfile
    import warnings

    import numpy as np

    import onefold

    deepest = 0

    def watch(frame, event, _):
        nonlocal deepest
        if event == "call" and str(SOURCE) in frame.f_code.co_filename:
            depth, above = 0, frame
            while above is not None:
                depth += str(SOURCE) in above.f_code.co_filename
                above = above.f_back
            deepest = max(deepest, depth)

    def measured(action) -> int:
        nonlocal deepest
        deepest = 0
        sys.setprofile(watch)
        try:
            action()
        finally:
            sys.setprofile(None)
        return deepest

    warnings.simplefilter("ignore")
    x = np.random.default_rng(0).integers(0, 256, (64, 8, 8), dtype=np.uint8)
    detector = onefold.CSD(recipe=onefold.nn.train.Recipe(steps=3, batch=8))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m.onefold")
        depths = {"CSD().fit": measured(lambda: detector.fit(x)), "score": measured(lambda: detector.score(x))}
        detector.save(path)
        return depths | {"load": measured(lambda: onefold.load(path))}


def documented() -> tuple[list[str], int]:
    """Return the callables of the site whose docs leave out an argument of their signature, and how many there are."""
    import importlib
    import inspect
    import re

    pages = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "docs" / "api").glob("*.md")))
    lacking, total = [], 0
    for name, options in re.findall(r"^::: (onefold[\w.]*)\n((?:    .*\n?)*)", pages, re.M):
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            try:
                thing = importlib.import_module(".".join(parts[:length]))
                break
            except ImportError:
                continue
        else:
            continue
        for part in parts[length:]:
            thing = getattr(thing, part)
        members = re.search(r"members: (\[.*?\]|false)", options)
        shown = {name: thing} if callable(thing) else {}
        if inspect.isclass(thing):
            listed = [] if members is None or members[1] == "false" else re.findall(r"\w+", members[1])
            shown |= {f"{name}.{member}": getattr(thing, member) for member in listed}
        for label, item in shown.items():
            if not callable(item):
                continue
            total += 1
            try:
                parameters = [
                    p for p in inspect.signature(item).parameters if p not in ("self", "cls", "args", "kwargs")
                ]
            except (TypeError, ValueError):
                continue
            text = (inspect.getdoc(item) or "").partition("Args:")[2]
            absent = [p for p in parameters if not re.search(rf"(?m)^\s+\*{{0,2}}{re.escape(p)}\b.*:", text)]
            if absent:
                lacking.append(f"{label}: {', '.join(absent)}")
    return lacking, total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print every place")
    parser.add_argument("--docs", action="store_true", help="count documented arguments, too (needs torch)")
    parser.add_argument("--stacks", action="store_true", help="measure stacks, too")
    chosen = parser.parse_args()
    vague, total = vague_names()
    private, records = private_accesses(), record_types()
    lines = sum(len(path.read_text("utf-8").splitlines()) for path in modules())
    print(f"modules: {len(modules())}, lines: {lines:,}")
    print(f"names that say nothing: {len(vague)} of {total:,}")
    print(f"private accesses between modules: {len(private)}")
    print(f"record types between a benchmark unit and its table: {len(records)}")
    print(f"modules loaded by import onefold.rl.bonus: {loaded('import onefold.rl.bonus')}")
    training = "import onefold.cli, onefold.rl.runs, onefold.rl.settings, onefold.rl.told"
    print(f"modules loaded by onefold rl train: {loaded(training)}")
    if chosen.list:
        print("\n".join(["", *vague, "", *private, "", *records]))
        words = Counter(place.rpartition(" ")[2].strip("_") for place in vague)
        print("\n" + ", ".join(f"{word} {count}" for word, count in words.most_common()))
    if chosen.docs:
        lacking, total = documented()
        print(f"callables of the site whose docs explain every argument: {total - len(lacking)} of {total}")
        if chosen.list:
            print("\n".join(lacking))
    if chosen.stacks:
        for name, depth in stacks().items():
            print(f"deepest stack of our own frames in {name}: {depth}")


if __name__ == "__main__":
    main()
