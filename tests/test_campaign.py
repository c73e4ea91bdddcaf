"""The campaign's script: its groups are valid runs, and a tiny group runs, is described and packed."""

import importlib.util
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from onefold.rl.settings import make_run, override_settings

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "campaign.py"


@pytest.fixture(scope="module")
def campaign() -> Any:
    spec = importlib.util.spec_from_file_location("campaign", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["campaign"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_groups_are_valid_runs_and_no_run_is_repeated(campaign: Any) -> None:
    specs = [spec for group in campaign.GROUPS.values() for spec in group]
    assert len({spec.folder for spec in specs}) == len(specs)
    agents = {}
    for spec in specs:
        run = override_settings(make_run(spec.agent, spec.environment, int(spec.frames), spec.seed), spec.settings)
        agents[spec.label or spec.agent] = run.agent
    assert agents["csd-variance"].bonus_form == "variance"
    assert agents["csd-centred"].bonus_form == "centred"
    assert not agents["rnd-one-head"].bonus_head
    assert agents["rnd-two-heads"].bonus_head


def test_choices_are_made_on_seeds_that_are_not_reported(campaign: Any) -> None:
    for name, group in campaign.GROUPS.items():
        if name != "trial":
            assert all((spec.seed < 10) == name.startswith("choice") for spec in group)


def test_a_group_is_started_described_and_packed(
    campaign: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, archive = tmp_path / "runs", tmp_path / "runs.tar.gz"
    campaign.main(["start", "trial", str(out), "--device", "cpu"])
    assert "chain-8/csd/seed0: started on cores" in capsys.readouterr().out
    folders = list(campaign.started(out))
    assert len(folders) == 2
    until = time.monotonic() + 600
    while not all("Trained: " in folder.with_name("seed0-log.txt").read_text() for folder in folders):
        assert time.monotonic() < until
        time.sleep(0.1)
    campaign.main(["status", str(out)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("chain-8/csd/seed0: 600 of 600 frames")
    assert lines[1].startswith("chain-8/rnd-lr/seed0: 600 of 600 frames")
    campaign.main(["pack", str(out), str(archive), "--networks", "chain-8/csd/seed0"])
    with tarfile.open(archive) as tar:
        names = set(tar.getnames())
    assert {"chain-8/csd/seed0/networks.safetensors", "chain-8/rnd-lr/seed0/episodes.csv"} <= names
    assert "chain-8/rnd-lr/seed0/networks.safetensors" not in names
