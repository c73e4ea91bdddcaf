"""The README's code runs, and its figures are those of the committed result files."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def test_the_demo_table_is_the_committed_result() -> None:
    methods = json.loads((ROOT / "results" / "demo.json").read_text())["methods"]
    for name, figures in methods.items():
        means = [f"{figures[metric]['mean']:.1f}" for metric in ("AUROC", "AUPR-IN", "AUPR-OUT", "FPR95")]
        seconds = f"{figures['fit_seconds'] + figures['score_seconds']:.1f}"
        assert f"| {name} | {' | '.join(means)} | {seconds} |" in README


def test_the_toy_figures_are_the_committed_result() -> None:
    toy = json.loads((ROOT / "results" / "toy.json").read_text())["plane"]["rank_correlation"]
    full, last = toy["exact NTK-GP / CSD, full NTK"], toy["exact NTK-GP / CSD, last layer"]
    text = " ".join(README.replace("*", "").split())
    assert f"rank correlation of {full:.2f}; with the cheap last-layer kernel, of {last:.2f}" in text


@pytest.mark.parametrize("name", ["demo.json", "toy.json", "csd_step.json"])
def test_results_say_where_they_come_from(name: str) -> None:
    result = json.loads((ROOT / "results" / name).read_text())
    assert re.fullmatch(r"[0-9a-f]{12}", result["commit"]), "made from a clean tree"
    assert {"date", "device", "torch", "cores"} <= set(result)


@pytest.mark.slow
def test_the_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(code, {})
    assert float(capsys.readouterr().out.split()[-1]) > 0.9
