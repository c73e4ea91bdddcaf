"""The README's figures are those of the committed result files; its code is run by tests/test_docs.py."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
DETECTION, COST = ((ROOT / "docs" / "results" / f"{name}.md").read_text("utf-8") for name in ("detection", "cost"))


def test_it_is_short() -> None:
    assert len(README.encode()) <= 6500


def test_the_toy_figures_are_the_committed_result() -> None:
    toy = json.loads((ROOT / "results" / "toy.json").read_text())["plane"]["rank_correlation"]
    full, last = toy["exact NTK-GP / CSD, full NTK"], toy["exact NTK-GP / CSD, last layer"]
    text = " ".join(DETECTION.split())
    assert f"rank correlation {full:.2f} with the full kernel, {last:.2f} with the last-layer kernel" in text


def test_the_table_of_detectors_is_the_committed_result() -> None:
    cells = json.loads((ROOT / "results" / "detectors.json").read_text())["cells"]
    sets = ("fashion_mnist", "mnist", "kmnist_10k", "notmnist_22k")
    for method in dict.fromkeys(cell.split("/")[0] for cell in cells):
        for kind in cells[f"{method}/mnist/seed0"]:
            if kind == "accuracy":
                continue
            means = [sum(cells[f"{method}/{name}/seed{seed}"][kind]["mean"] for seed in (0, 1)) / 2 for name in sets]
            label = method if kind == "score" else f"{method}, by {kind}"
            row = f"| {label} | {' | '.join(f'{mean:.1f}' for mean in means)} |"
            assert row in DETECTION or (kind != "score" and not method.startswith("CSD")), row


def test_the_default_score_is_as_far_below_the_better_of_the_two_as_the_page_says() -> None:
    """For every set and every detector that has the choice, in the mean over the seeds."""
    cells = json.loads((ROOT / "results" / "detectors.json").read_text())["cells"]
    choices = [name for name, cell in cells.items() if "relative" in cell and name.endswith("seed0")]
    gains = []
    for name in choices:
        both = [cells[name], cells[name.replace("seed0", "seed1")]]
        score, variance, relative = (sum(c[k]["mean"] for c in both) / 2 for k in ("score", "variance", "relative"))
        gains.append(score - max(variance, relative))
    stated = re.search(
        r"above both in (\d+) of (\d+) cells.*? At worst it is ([\d.]+) below the better one",
        " ".join(DETECTION.split()),
    )
    assert stated is not None
    assert (sum(gain > 0 for gain in gains), len(gains)) == (int(stated[1]), int(stated[2]))
    assert -min(gains) == pytest.approx(float(stated[3]), abs=0.05)


def test_post_hoc_beats_its_rivals_on_every_set() -> None:
    cells = json.loads((ROOT / "results" / "detectors.json").read_text())["cells"]
    rivals = ("KNN on a trained model", "KNN on a trained model, last layer", "Energy", "ENS(5)")
    for name in ("fashion_mnist", "mnist", "kmnist_10k", "notmnist_22k"):

        def mean(method: str, name: str = name) -> float:
            return sum(cells[f"{method}/{name}/seed{seed}"]["score"]["mean"] for seed in (0, 1)) / 2

        assert all(mean("CSD on a trained model") > mean(rival) for rival in rivals), name


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_table_of_costs_is_the_committed_result_and_keeps_its_promises(device: str) -> None:
    passes = json.loads((ROOT / "results" / f"scoring_{device}.json").read_text())["passes"]
    column = {"cpu": 1, "gpu": 2}[device]
    cells = [line.strip("| ").split("|") for line in COST.splitlines()]
    rows = {row[0].strip(): row for row in cells if len(row) == 3}
    if device == "cpu":
        own, many = passes["CSD on the classifier, its own pass included"], passes["ensemble of 15"]
        assert f"costs {own:.2f} forward passes" in README
        assert f"an ensemble of 15 costs {many:.0f}" in README
    for name, value in passes.items():
        assert float(rows[name][column]) == pytest.approx(value, abs=0.006 if value < 10 else 0.6), name
    assert passes["CSD"] <= 2
    assert passes["CSD on the classifier, its own pass included"] <= 1.5
    assert passes["ensemble of 15"] / passes["CSD"] >= 7


RESULTS = [
    *("toy.json", "detectors.json", "fit.json", "column.json", "growth.json"),
    *("scoring_cpu.json", "scoring_gpu.json", "agent.json", "stages.json"),
    *("default_score.json", "fit_on_model.json", "scoring_on_model.json"),
    *("environments.json", "environments_two_cores.json", "monitor.json", "regression.json"),
]
RUNS = {
    "shift": {"settings", "data"},
    "ablation": {"settings", "data"},
    "bonuses": {"task", "bonus", "beta", "rate", "seed", "steps"},
}  # what each file says


@pytest.mark.parametrize("name", RESULTS)
def test_results_say_where_they_come_from(name: str) -> None:
    result = json.loads((ROOT / "results" / name).read_text())
    assert re.fullmatch(r"[0-9a-f]{12}", result["commit"]), "made from a clean tree"
    assert {"date", "device", "torch", "cores"} <= set(result)


@pytest.mark.parametrize("name", RUNS)
def test_every_unit_says_where_it_comes_from(name: str) -> None:
    units = [
        path for path in (ROOT / "results" / name).rglob("*.json") if path.name not in ("bench.json", "visits.json")
    ]
    assert units
    for path in units:
        result = json.loads(path.read_text())
        assert re.fullmatch(r"[0-9a-f]{12}", result["commit"]), f"{path.name}: made from a clean tree"
        assert {"date", "device", "torch", "cores"} | RUNS[name] <= set(result)


def test_every_result_is_known() -> None:
    assert {path.name for path in (ROOT / "results").iterdir()} == {*RESULTS, *RUNS}


def test_results_come_from_commits_that_exist() -> None:
    """Of a release without its history nothing is known."""

    def git(*words: str, given: str = "") -> str:
        return subprocess.run(["git", *words], cwd=ROOT, input=given, capture_output=True, text=True).stdout

    if shutil.which("git") is None or git("rev-parse", "--is-shallow-repository").strip() != "false":
        pytest.skip("no whole history here")
    found = {json.loads(path.read_text()).get("commit") for path in (ROOT / "results").rglob("*.json")} - {None}
    answers = git("cat-file", "--batch-check", given="\n".join(sorted(found))).splitlines()
    assert [answer for answer in answers if answer.split()[1] != "commit"] == []
