"""Rebuild every published table and figure from the committed result files, and compare them with the site's.

    python benchmarks/paper.py [--out out/paper] [--fast]

Pages and figures are written below OUT, under their paths in the repository. The exit status is 1 if one of them
differs from the committed file; copy it from OUT to accept it. Figures that are drawn from result files must agree in
every pixel. Those that compute what they show, and take minutes, may differ by rounding; `--fast` leaves them out.
"""

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
from PIL import Image

ROOT = Path(__file__).parent.parent
IMAGES = "docs/images"
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "docs" / "figures")]

import tables  # noqa: E402

LEVELS = 2  # grey levels of 256 by which antialiasing may differ
COMPUTED_SHARE = 0.01  # of the pixels of a computed figure that may differ by more


def build_pages(out: Path) -> list[str]:
    """Write every page with its tables filled in, and return their names."""
    for name, writers in tables.PAGES.items():
        text = (ROOT / name).read_text("utf-8")
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(tables.filled(text, name, writers), "utf-8")
    return list(tables.PAGES)


def build_figures(out: Path, *, computed: bool) -> list[str]:
    """Draw the figures that are computed, or those drawn from result files, and return their names."""
    folder = out / IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    figures = [figure for figure in tables.FIGURES if figure.computed == computed]
    for script in dict.fromkeys(figure.script for figure in figures):
        if script == "onefold toy":
            subprocess.run([sys.executable, "-m", "onefold.cli", "toy", "--out", str(folder)], check=True)
        else:
            load_script(ROOT / script).main(folder)
    return [f"{IMAGES}/{name}" for figure in figures for name in figure.file_names()]


def load_script(path: Path) -> ModuleType:
    """Return a script as a module. Its name may be that of another one, such as benchmarks/growth.py."""
    spec = importlib.util.spec_from_file_location(f"figure_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def same_text(built: Path, committed: Path) -> bool:
    """Return True if both files exist and hold the same text."""
    return committed.is_file() and built.read_text("utf-8") == committed.read_text("utf-8")


def same_picture(built: Path, committed: Path, share: float = 0.0) -> bool:
    """Return True if two pictures have one size and at most this share of their pixels differ."""
    if not committed.is_file():
        return False
    left, right = (np.asarray(Image.open(path).convert("RGB")).astype(int) for path in (built, committed))
    return left.shape == right.shape and float((abs(left - right).max(-1) > LEVELS).mean()) <= share


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "paper")
    parser.add_argument("--fast", action="store_true", help="leave out the figures that compute what they show")
    options = parser.parse_args(arguments)
    same = {name: same_text(options.out / name, ROOT / name) for name in build_pages(options.out)}
    for computed in (False,) if options.fast else (False, True):
        for name in build_figures(options.out, computed=computed):
            share = COMPUTED_SHARE if computed else 0.0
            same[name] = same_picture(options.out / name, ROOT / name, share)
    for name, unchanged in same.items():
        print(f"{'same' if unchanged else 'DIFFERS':8} {name}")
    if all(same.values()):
        return 0
    print(
        f"Compare the files with those below {options.out}, and copy them from there to accept them.", file=sys.stderr
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
