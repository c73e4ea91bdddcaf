"""Write the README's tables anew from the committed result files.

python benchmarks/tables.py
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SETS = ("fashion_mnist", "mnist", "kmnist_10k", "notmnist_22k")


def result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "results" / f"{name}.json").read_text("utf-8"))


def detectors() -> list[str]:
    cells = result("detectors")["cells"]
    rows = [f"| method | {' | '.join(SETS)} |", "|---|---|---|---|---|"]
    for method in dict.fromkeys(cell.split("/")[0] for cell in cells):
        for kind in cells[f"{method}/mnist/seed0"]:
            if kind == "accuracy" or (kind != "score" and not method.startswith("CSD")):
                continue
            means = [sum(cells[f"{method}/{name}/seed{seed}"][kind]["mean"] for seed in (0, 1)) / 2 for name in SETS]
            label = method if kind == "score" else f"{method}, by {kind}"
            rows.append(f"| {label} | {' | '.join(f'{mean:.1f}' for mean in means)} |")
    return rows


def scoring() -> list[str]:
    cpu, gpu = (result(f"scoring_{device}")["passes"] for device in ("cpu", "gpu"))

    def shown(passes: dict[str, float], name: str) -> str:
        value = passes.get(name)
        return "–" if value is None else f"{value:.2f}" if value < 10 else f"{value:.0f}"

    rows = ["| | two CPU cores | one H200 |", "|---|---|---|"]
    return rows + [f"| {name} | {shown(cpu, name)} | {shown(gpu, name)} |" for name in cpu]


def demo() -> list[str]:
    rows = ["| method | AUROC | AUPR-IN | AUPR-OUT | FPR95 (lower is better) | seconds |", "|---|---|---|---|---|---|"]
    for name, figures in result("demo")["methods"].items():
        means = [f"{figures[metric]['mean']:.1f}" for metric in ("AUROC", "AUPR-IN", "AUPR-OUT", "FPR95")]
        rows.append(f"| {name} | {' | '.join(means)} | {figures['fit_seconds'] + figures['score_seconds']:.1f} |")
    return rows


def main() -> None:
    path = ROOT / "README.md"
    text = path.read_text("utf-8")
    for table in (detectors, scoring, demo):
        begin, end = f"<!-- {table.__name__} -->\n", f"\n<!-- end of {table.__name__} -->"
        pattern = re.compile(f"({re.escape(begin)}).*?({re.escape(end)})", re.DOTALL)
        assert pattern.search(text), f"README.md has no place for the table {table.__name__}"
        text = pattern.sub(lambda found, table=table: found[1] + "\n".join(table()) + found[2], text)
    path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
