"""Rewrite the module map of docs/architecture.md from the first lines of the modules' docstrings.

python tools/module_map.py
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "onefold"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- modules -->\n", "\n<!-- end of modules -->"


def summary(path: Path) -> str:
    """Return the first line of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return docstring.partition("\n")[0]


def tables() -> list[str]:
    """Return a table of the modules in the root, then one per package."""
    root = [path for path in sorted(SOURCE.glob("*.py")) if path.stem != "__init__"]
    lines = ["| module | what it holds |", "|---|---|", *(f"| `{path.stem}` | {summary(path)} |" for path in root)]
    for package in sorted(path.parent for path in SOURCE.rglob("__init__.py") if path.parent != SOURCE):
        name = package.relative_to(SOURCE).as_posix()
        lines += [
            "",
            f"### `{name}`",
            "",
            summary(package / "__init__.py"),
            "",
            "| module | what it holds |",
            "|---|---|",
        ]
        modules = [path for path in sorted(package.glob("*.py")) if path.stem not in ("__init__", "__main__")]
        lines += [f"| `{path.stem}` | {summary(path)} |" for path in modules]
    return lines


def filled(text: str) -> str:
    """Return the page with its module map up to date."""
    pattern = re.compile(f"({re.escape(BEGIN)}).*?({re.escape(END)})", re.DOTALL)
    return pattern.sub(lambda match: match[1] + "\n".join(tables()) + match[2], text)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text("utf-8")), "utf-8")
