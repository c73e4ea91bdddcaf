"""The training runs behind the exploration figures: groups of runs, side by side on one GPU machine.

    python benchmarks/campaign.py list
    python benchmarks/campaign.py start GROUP OUT [--frames 3e6] [--device cuda]
    python benchmarks/campaign.py status OUT
    python benchmarks/campaign.py pack OUT ARCHIVE.tar.gz [--networks RUN ...]

`start` starts every run of a group as a process of its own, with its share of the cores, and returns at once. On a GPU
it starts NVIDIA's multi-process service first, so that the runs share the card. `status` prints a line per run. `pack`
writes the result files of all runs into one archive; networks are large and are packed only where named.

Seeds 0 to 2 are for choices. The reported seeds begin at 10, and each of them is run once.
"""

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SPARSE, VERY_SPARSE, DENSE = "my-way-home-sparse", "my-way-home-very-sparse", "my-way-home-dense"
RESULT_FILES = ("settings.json", "progress.csv", "episodes.csv", "visits.json")
NETWORKS, LOG = "networks.safetensors", "log.txt"
NEVER = "1e12"  # frames between checkpoints: a run that the machine cuts off is started again


@dataclass(frozen=True)
class RunSpec:
    """One training run. `label` names its folder where the agent differs from the one of that name by `settings`."""

    agent: str
    environment: str
    seed: int
    frames: float = 3e6
    label: str = ""
    settings: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return Path(self.environment, self.label or self.agent, f"seed{self.seed}")


def runs(
    agent: str, environment: str, seeds: Sequence[int], frames: float = 3e6, *settings: str, label: str = ""
) -> list[RunSpec]:
    return [RunSpec(agent, environment, seed, frames, label, settings) for seed in seeds]


CENTRED = ("agent.bonus_form=centred",)
TWO_HEADS = ("agent.bonus_head=true", "agent.q_bound=2.0", "agent.u_bound=3.4")  # as CSD's agent
RIVALS = ("rnd", "dqn", "ids", "bdqn")

GROUPS: dict[str, list[RunSpec]] = {
    "choice-1": [
        *runs("csd", SPARSE, (0, 1, 2), label="csd-variance"),
        *runs("rnd", SPARSE, (0, 1), label="rnd-one-head"),
    ],
    "choice-2": [
        *runs("csd", SPARSE, (0, 1, 2), 3e6, *CENTRED, label="csd-centred"),
        *runs("rnd", SPARSE, (0, 1), 3e6, *TWO_HEADS, label="rnd-two-heads"),
    ],
    "sparse-csd": runs("csd", SPARSE, range(10, 15)),
    "sparse-rivals-1": [*runs("rnd", SPARSE, (10, 11, 12)), *runs("dqn", SPARSE, (10, 11))],
    "sparse-rivals-2": [
        *runs("dqn", SPARSE, (12,)),
        *runs("ids", SPARSE, (10, 11)),
        *runs("bdqn", SPARSE, (10, 11)),
    ],
    "very-sparse-csd": runs("csd", VERY_SPARSE, range(10, 15)),
    "very-sparse-rivals-1": [*runs("rnd", VERY_SPARSE, (10, 11, 12)), *runs("dqn", VERY_SPARSE, (10, 11))],
    "very-sparse-rivals-2": [*runs("ids", VERY_SPARSE, (10, 11)), *runs("bdqn", VERY_SPARSE, (10, 11))],
    "whole": runs("csd", SPARSE, (15, 16), 5e6),
    "dense-1": [*runs("csd", DENSE, (10, 11, 12), 2e6), *runs("rnd", DENSE, (10, 11), 2e6)],
    "dense-2": [run for agent in RIVALS[1:] for run in runs(agent, DENSE, (10, 11), 2e6)],
    "trial": [*runs("csd", "chain-8", (0,), 600), *runs("rnd", "chain-8", (0,), 600, "agent.lr=2e-4", label="rnd-lr")],
}


def start(group: str, out: Path, frames: float | None, device: str) -> None:
    if device == "cuda" and (control := shutil.which("nvidia-cuda-mps-control")):
        subprocess.run([control, "-d"], check=False)  # fails if it runs already
    specs, cores = GROUPS[group], sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // len(specs))
    for i, spec in enumerate(specs):
        folder = out / spec.folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        log = folder.with_name(f"{folder.name}-{LOG}")
        share = ",".join(str(cores[(i * each + j) % len(cores)]) for j in range(each))
        command = [
            "setsid", "--fork", "taskset", "--cpu-list", share,
            sys.executable, "-m", "onefold.cli", "rl", "train", "-o", str(folder), "--agent", spec.agent,
            "--env", spec.environment, "--frames", str(frames or spec.frames), "--seed", str(spec.seed),
            "--workers", str(each), "--checkpoint", NEVER, "--device", device,
        ]  # fmt: skip
        command += ["--set", *spec.settings] if spec.settings else []
        with log.open("w") as file:
            subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=True)
        print(f"{spec.folder}: started on cores {share}")


def started(out: Path) -> Iterator[Path]:
    """Yield the folders of the runs, whether they have begun or not."""
    for log in sorted(out.rglob(f"*-{LOG}")):
        yield log.with_name(log.name.removesuffix(f"-{LOG}"))


def status(out: Path) -> None:
    for folder in started(out):
        print(f"{folder.relative_to(out)}: {describe(folder)}")


def table(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def describe(folder: Path) -> str:
    """Return how far a run is, or the last line of its log if there is nothing yet."""
    settings, progress, episodes = (folder / name for name in ("settings.json", "progress.csv", "episodes.csv"))
    rows = table(progress)
    if not rows:
        lines = folder.with_name(f"{folder.name}-{LOG}").read_text().splitlines()
        return lines[-1] if lines else "nothing yet"
    last, total = rows[-1], json.loads(settings.read_text())["run"]["frames"]
    goals = [row["success"] == "1" for row in table(episodes)]
    recent = goals[-100:]
    share = f"{sum(recent)} of the last {len(recent)} episodes" if recent else "no episode yet"
    seconds = float(last["seconds"])
    q, u = float(last["q_value"]), float(last["u_value"])
    return (
        f"{int(last['frames']):,} of {total:,} frames in {seconds:.0f} s, {float(last['frames_per_second']):.0f}/s; "
        f"{sum(goals)} goals, {share}; Q {q:.3g}, U {u:.3g}"
    )


def pack(out: Path, archive: Path, networks: Sequence[str]) -> None:
    with tarfile.open(archive, "w:gz") as tar:
        for folder in started(out):
            names = [*RESULT_FILES, *([NETWORKS] if str(folder.relative_to(out)) in networks else [])]
            paths = [*(folder / name for name in names), folder.with_name(f"{folder.name}-{LOG}")]
            for path in (path for path in paths if path.exists()):
                tar.add(path, path.relative_to(out))
    print(f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="print the groups and their runs")
    starter = commands.add_parser("start", help="start a group of runs")
    starter.add_argument("group", choices=GROUPS)
    starter.add_argument("out", type=Path)
    starter.add_argument("--frames", type=float, help="frames of each run, in place of the group's own")
    starter.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    commands.add_parser("status", help="print a line per run").add_argument("out", type=Path)
    packer = commands.add_parser("pack", help="write the result files into an archive")
    packer.add_argument("out", type=Path)
    packer.add_argument("archive", type=Path)
    packer.add_argument("--networks", nargs="*", default=[], help="runs whose networks are packed, too")
    chosen = parser.parse_args(arguments)
    if chosen.command == "list":
        for name, specs in GROUPS.items():
            print(f"{name}: " + ", ".join(f"{spec.folder} ({spec.frames:g})" for spec in specs))
    elif chosen.command == "start":
        start(chosen.group, chosen.out, chosen.frames, chosen.device)
    elif chosen.command == "status":
        status(chosen.out)
    else:
        pack(chosen.out, chosen.archive, chosen.networks)


if __name__ == "__main__":
    main()
