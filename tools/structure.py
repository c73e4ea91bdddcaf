"""Count the weaknesses in the structure of the package and list where they are.

    python tools/structure.py            # the counts
    python tools/structure.py --list     # and the place of each
    python tools/structure.py --docs     # and the callables of the site with undocumented arguments
    python tools/structure.py --stacks   # and the deepest stacks of our frames in fit, score and load

Counted: vague names, accesses to private names of other modules, record types of the benchmark and its report, and
modules that two entry points load. --docs and --stacks import torch.
"""

import argparse
import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "onefold"
VAGUE = {
    "found", "own", "said", "given", "known", "there", "aside", "told", "judged", "hopes", "bury", "hire", "staff",
    "apart", "untried", "news", "glimpse", "whose",
}  # fmt: skip
PUBLIC = {"_asdict", "_replace", "_fields", "_make"}  # methods of named tuples
RECORDS = ("dataclass", "NamedTuple", "TypedDict")
REPORT_MODULES = ("shift", "seeds", "paper", "bench", "stats", "tables")  # of the benchmark
TRAINING = """
import tempfile
from onefold.cli import main
with tempfile.TemporaryDirectory() as folder:
    options = ["--agent", "csd", "--env", "chain-8", "--frames", "64", "--device", "cpu"]
    assert main(["rl", "train", "-o", folder + "/run", *options]) == 0
"""


class Place(NamedTuple):
    """One weakness: a file, a line and a name."""

    path: Path
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.name}"


def modules() -> dict[Path, ast.Module]:
    """Return the syntax tree of each module."""
    return {path: ast.parse(path.read_text("utf-8")) for path in sorted(SOURCE.rglob("*.py"))}


def defined_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield every name that a module defines, with its line: locals, parameters, attributes, functions, classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield (node.id if isinstance(node, ast.Name) else node.attr), node.lineno
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name, node.lineno
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname, node.lineno) for alias in node.names if alias.asname)


def vague_names(trees: dict[Path, ast.Module]) -> tuple[list[Place], int]:
    """Return the vague names, and the number of all names."""
    names = [Place(path, line, name) for path, tree in trees.items() for name, line in defined_names(tree)]
    return [place for place in names if place.name.strip("_") in VAGUE], len(names)


def is_private(name: str) -> bool:
    """Return True for one leading underscore, except the public methods of named tuples."""
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def private_accesses(trees: dict[Path, ast.Module]) -> list[Place]:
    """Return uses of private names that another module defines, and imports of private modules of other packages.

    A private attribute counts if this module does not define the name and another module does, unless it is inherited.
    Private names of other libraries do not count.
    """
    names = {path: {name for name, _ in defined_names(tree)} for path, tree in trees.items()}
    everywhere = set().union(*names.values())
    places = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onefold"):
                places += [Place(path, node.lineno, name) for name in private_imports(path, node)]
            elif isinstance(node, ast.Attribute) and is_private(node.attr) and not is_inherited(node.value):
                places += [Place(path, node.lineno, ast.unparse(node))] if node.attr in everywhere - names[path] else []
    return places


def is_inherited(owner: ast.expr) -> bool:
    """Return True for self, cls and super(): a class may use private names of its bases."""
    return ast.unparse(owner) in ("self", "cls", "super()")


def private_imports(path: Path, node: ast.ImportFrom) -> list[str]:
    """Return the private names of an import; private modules are allowed within their package."""
    *package, last = (node.module or "").split(".")
    here = ["onefold", *path.parent.relative_to(SOURCE).parts]
    private = [f"{node.module}.{alias.name}" for alias in node.names if is_private(alias.name)]
    if [*package, last] == here:  # from onefold.detectors import _members, inside onefold.detectors
        private = [name for name in private if not (path.parent / f"{name.rpartition('.')[2]}.py").exists()]
    if any(is_private(part) for part in package) or (is_private(last) and package != here):
        private.append(str(node.module))
    return private


def record_types(trees: dict[Path, ast.Module]) -> list[Place]:
    """Return the dataclasses, named tuples and typed dicts between a benchmark unit and its table."""
    places = []
    for path, tree in trees.items():
        package = path.relative_to(SOURCE).parts[0]
        if package == "bench" or (package == "report" and path.stem.startswith(REPORT_MODULES)):
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    marks = " ".join(ast.unparse(part) for part in [*node.decorator_list, *node.bases])
                    if any(record in marks for record in RECORDS):
                        places.append(Place(path, node.lineno, node.name))
    return places


def loaded_modules(code: str) -> list[str]:
    """Return the modules of onefold that a script loads in a fresh process."""
    script = f"{code}\nimport sys\nprint(*(name for name in sys.modules if name.split('.')[0] == 'onefold'))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return sorted(done.stdout.splitlines()[-1].split())


def deepest_stacks() -> dict[str, int]:
    """Return the largest number of our frames on the stack in three verbs."""
    import tempfile
    import warnings

    import numpy as np

    import onefold

    deepest = 0

    def watch(frame: Any, event: str, _: Any) -> None:
        nonlocal deepest
        if event == "call" and str(SOURCE) in frame.f_code.co_filename:
            depth, above = 0, frame
            while above is not None:
                depth += str(SOURCE) in above.f_code.co_filename
                above = above.f_back
            deepest = max(deepest, depth)

    def measure(action: Callable[[], Any]) -> int:
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
        depths = {"CSD().fit": measure(lambda: detector.fit(x)), "score": measure(lambda: detector.score(x))}
        detector.save(path)
        return depths | {"load": measure(lambda: onefold.load(path))}


def site_callables() -> dict[str, Any]:
    """Return the callables that the pages of docs/api show, methods included."""
    pages = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "docs" / "api").glob("*.md")))
    shown = {}
    for name, options in re.findall(r"^::: (onefold[\w.]*)\n((?:    .*\n?)*)", pages, re.M):
        thing = resolve(name)
        if callable(thing):
            shown[name] = thing
        members = re.search(r"members: (\[.*?\])", options)
        for member in re.findall(r"\w+", members[1]) if members else ():
            if callable(getattr(thing, member)):
                shown[f"{name}.{member}"] = getattr(thing, member)
    return shown


def resolve(name: str) -> Any:
    """Return the module, class or function of a dotted name."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            thing = getattr(thing, part)
        return thing
    raise LookupError(name)


def undocumented(thing: Any) -> list[str]:
    """Return the arguments that a docstring leaves out, and "Returns" where it does not describe the result.

    Arguments are documented under "Args:", or "Attributes:" of a class; fields of a dataclass also by a docstring after
    the field.
    """
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return []
    text = inspect.getdoc(thing) or ""
    if inspect.isclass(thing) and thing.__init__.__doc__ and thing.__init__ is not object.__init__:
        text += "\n" + inspect.cleandoc(thing.__init__.__doc__)
    documented = set(re.findall(r"(?m)^ +\*{0,2}(\w+)(?: \([^\n]*\))?:", section(text, "Args", "Attributes")))
    documented |= set(documented_fields(thing)) if inspect.isclass(thing) else set()
    skipped = {"self", "cls", "args", "kwargs", *documented}
    missing = [name for name in signature.parameters if name not in skipped]
    has_result = not inspect.isclass(thing) and signature.return_annotation not in (None, "None", signature.empty)
    if has_result and not re.search(r"(?m)^(Returns|Yields):", text):
        missing.append("Returns")
    return missing


def section(text: str, *titles: str) -> str:
    """Return the indented lines below the titles in a docstring."""
    pattern = rf"(?m)^(?:{'|'.join(titles)}):\n((?:[ ]+\S.*\n?|\n)*)"
    return "\n".join(re.findall(pattern, text))


def documented_fields(thing: type) -> Iterator[str]:
    """Yield the fields of a class that a docstring follows."""
    for base in thing.__mro__:
        if not base.__module__.startswith("onefold"):
            continue
        body = ast.parse(inspect.cleandoc("\n" + inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
                yield field.target.id


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list the place of each")
    parser.add_argument("--docs", action="store_true", help="list callables of the site with undocumented arguments")
    parser.add_argument("--stacks", action="store_true", help="measure the stacks")
    options = parser.parse_args()
    trees = modules()
    vague, total = vague_names(trees)
    private, records = private_accesses(trees), record_types(trees)
    lines = sum(len(path.read_text("utf-8").splitlines()) for path in trees)
    bonus, training = loaded_modules("import onefold.rl.bonus"), loaded_modules(TRAINING)
    print(f"modules: {len(trees)}, lines: {lines:,}")
    print(f"vague names: {len(vague)} of {total:,}")
    print(f"private accesses between modules: {len(private)}")
    print(f"record types between a benchmark unit and its table: {len(records)}")
    print(f"modules loaded by import onefold.rl.bonus: {len(bonus)}")
    print(f"modules loaded by onefold rl train: {len(training)}")
    if options.list:
        for title, places in {"Vague names": vague, "Private accesses": private, "Record types": records}.items():
            print("\n".join(["", f"{title}:", *map(str, places)]))
        words = Counter(place.name.strip("_") for place in vague)
        print("\n" + ", ".join(f"{word} {count}" for word, count in words.most_common()))
        print(f"\nLoaded by import onefold.rl.bonus: {', '.join(bonus)}")
        print(f"\nLoaded by onefold rl train: {', '.join(training)}")
    if options.docs:
        missing = {name: undocumented(thing) for name, thing in site_callables().items()}
        complete = sum(not names for names in missing.values())
        arguments = sum(set(names) <= {"Returns"} for names in missing.values())
        print(f"callables of the site whose docs explain every argument: {arguments} of {len(missing)}")
        print(f"callables of the site whose docs explain every argument and the result: {complete} of {len(missing)}")
        print("\n".join(f"  {name}: {', '.join(names)}" for name, names in missing.items() if names))
    if options.stacks:
        for name, depth in deepest_stacks().items():
            print(f"deepest stack of our frames in {name}: {depth}")


if __name__ == "__main__":
    main()
