"""CPU seconds of `onefold score` on one small image, relative to `import torch`.

    python benchmarks/startup.py [--repeats 5]

Each command runs in fresh processes, in turn, so that a busy machine slows both alike; the table has the medians and
their ratio. The goal is a ratio of at most 1.4.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np

import onefold
from onefold.nn.train import Recipe

SCORE = "from onefold.cli import main; main(['score', 'm.onefold', 'one.npy', '-o', 's.csv', '--device', 'cpu'])"
COMMANDS = {
    "import torch": "import torch",
    "onefold --help": "from onefold.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
    "onefold score": SCORE,
}


def cpu_seconds(code: str, folder: Path) -> float:
    """Return the user and system seconds of a script in a fresh process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8)
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        detector = onefold.CSD(recipe=Recipe(steps=2, batch=8), device="cpu").fit(images)
        detector.calibrate(images, fpr=0.1).save(folder / "m.onefold")
        np.save(folder / "one.npy", images[:1])
        for code in COMMANDS.values():  # fills the caches of the disk and of compiled modules
            cpu_seconds(code, folder)
        seconds: dict[str, list[float]] = {command: [] for command in COMMANDS}
        for _ in range(repeats):
            for command, code in COMMANDS.items():
                seconds[command].append(cpu_seconds(code, folder))
    reference = statistics.median(seconds["import torch"])
    print("| command | CPU seconds | ratio to `import torch` |\n|---|---|---|")
    for command, values in seconds.items():
        print(f"| `{command}` | {statistics.median(values):.2f} | {statistics.median(values) / reference:.2f} |")


if __name__ == "__main__":
    main()
