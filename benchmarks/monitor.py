"""Level and delay of `onefold.Monitor`, by simulation.

    python benchmarks/monitor.py [--out FILE.json] [--streams 100000] [--delay-streams 10000]

Level: the share of familiar streams that raise a false alarm within 10,000 inputs. Each stream has a calibration set of
its own. It is at most alpha if the monitor is valid; a cell fails if the lower 99 % limit of the share is above alpha.
Delay: the number of inputs until the alarm, if a share of them is OOD and scores above all calibration scores.

Scores enter only by the probability that an input exceeds each limit of the monitor. For continuous scores, these
probabilities are uniform order statistics; with ties, scores are standard normal and rounded to one decimal. Finished
cells are kept in the file, so the same command resumes a stopped run.
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64
from scipy.stats import beta, norm

from onefold.core.batches import pick_device
from onefold.core.progress import show_progress
from onefold.core.provenance import provenance
from onefold.core.storage import write_json
from onefold.monitor import BETS, betting_score, tail_ranks, upper_limits

SAMPLES = (100, 300, 1000, 3000)
ALPHAS = (1e-2, 1e-3)
OOD_SHARES = (0.05, 0.1, 0.2, 0.5)
FAMILIAR_BEFORE = (0, 1000, 10_000)  # familiar inputs before the OOD inputs begin
INPUTS = 10_000  # of a stream
BLOCK = 100  # inputs whose counts are drawn at once
CHUNK = 2500  # streams that are simulated at once
SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--streams", type=int, default=100_000)
    parser.add_argument("--delay-streams", type=int, default=10_000)
    options = parser.parse_args()
    settings = {"inputs": INPUTS, "streams": options.streams, "delay_streams": options.delay_streams, "seed": SEED}
    cells: dict[str, dict[str, Any]] = {"level": {}, "delay": {}}
    if options.out is not None and options.out.exists():
        content = json.loads(options.out.read_text("utf-8"))
        if {name: content[name] for name in settings} != settings:
            parser.error(f"{options.out}: has other settings. Name another file")
        cells = {name: content[name] for name in cells}

    def store(kind: str, name: str, cell: dict[str, Any]) -> None:
        cells[kind][name] = cell
        print(f"{kind} {name}: {json.dumps(cell)}", flush=True)
        if options.out is not None:
            write_json(options.out, {**provenance(pick_device("cpu")), **settings, **cells})

    for i, (samples, alpha, ties) in enumerate(itertools.product(SAMPLES, ALPHAS, (False, True))):
        name = f"n={samples}/alpha={alpha:g}/{'ties' if ties else 'no ties'}"
        if name not in cells["level"]:
            rng = np.random.default_rng([SEED, 0, i])
            store("level", name, level(samples, alpha, ties, options.streams, rng, name))
    for i, (samples, share, before) in enumerate(itertools.product(SAMPLES, OOD_SHARES, FAMILIAR_BEFORE)):
        name = f"n={samples}/ood={share:g}/after={before}"
        if name not in cells["delay"]:
            rng = np.random.default_rng([SEED, 1, i])
            store("delay", name, delay(samples, share, before, options.delay_streams, rng, name))


def level(
    samples: int, alpha: float, ties: bool, streams: int, rng: np.random.Generator, label: str = ""
) -> dict[str, Any]:
    """Return the share of familiar streams with a false alarm, and its lower one-sided 99 % limit."""
    alarms = 0
    with show_progress(label, streams, show=True) as display:
        for start in range(0, streams, CHUNK):
            count = min(CHUNK, streams - start)
            tails = exceedance_probabilities(samples, count, rng, ties=ties)
            alarms += int((first_crossings(tails, samples, alpha, INPUTS, rng) > 0).sum())
            display.update(start + count)
    lower = float(beta.ppf(0.01, alarms, streams - alarms + 1)) if alarms else 0.0
    return {"alarms": alarms, "share": alarms / streams, "lower_limit": lower, "valid": lower <= alpha}


def delay(
    samples: int, share: float, before: int, streams: int, rng: np.random.Generator, label: str = ""
) -> dict[str, Any]:
    """Return quantiles of the number of inputs until the alarm at alpha = 0.001; None beyond INPUTS."""
    crossings = []
    with show_progress(label, streams, show=True) as display:
        for start in range(0, streams, CHUNK):
            count = min(CHUNK, streams - start)
            tails = exceedance_probabilities(samples, count, rng)
            mixture = share + (1 - share) * tails
            crossings.append(first_crossings(mixture, samples, 1e-3, INPUTS, rng, familiar=(tails, before)))
            display.update(start + count)
    inputs = np.concatenate(crossings)
    waits = np.sort(np.where(inputs > 0, inputs, np.inf))
    median, late = (waits[int(q * (streams - 1))] for q in (0.5, 0.9))
    return {
        "median": int(median) if np.isfinite(median) else None,
        "quantile_90": int(late) if np.isfinite(late) else None,
        "share_of_alarms": float((inputs > 0).mean()),
    }


def exceedance_probabilities(
    samples: int, streams: int, rng: np.random.Generator, *, ties: bool = False
) -> Float64[np.ndarray, "s j"]:
    """Return P(S > k-th largest calibration score | calibration) for every rank k, for calibration sets of streams."""
    ranks = tail_ranks(samples)
    parts = rng.gamma(np.diff([0, *ranks, samples + 1]), size=(streams, len(ranks) + 1))
    tails = (parts.cumsum(axis=1) / parts.sum(axis=1, keepdims=True))[:, :-1]
    if not ties:
        return tails
    edges = np.append(0.0, norm.sf(np.arange(-60, 61)[::-1] / 10 + 0.05))  # P(rounded score > value), ascending
    return edges[np.searchsorted(edges, tails, side="right") - 1]


def first_crossings(
    tails: Float64[np.ndarray, "s j"],
    samples: int,
    alpha: float,
    inputs: int,
    rng: np.random.Generator,
    familiar: tuple[Float64[np.ndarray, "s j"], int] | None = None,
) -> Int64[np.ndarray, " s"]:
    """Return the number of inputs until each stream raises an alarm; 0 without one.

    The counts of a block of inputs are multinomial. The order of its inputs is drawn only if an alarm is possible.

    Args:
        tails: Probability that an input exceeds each limit of the monitor.
        samples: Number of calibration samples.
        alpha: Level of the monitor.
        inputs: Length of a stream.
        rng: Random generator.
        familiar: Probabilities of familiar inputs, and their number before the first of the `inputs`.
    """
    limits, log_limit = upper_limits(samples, tail_ranks(samples), alpha), np.log(2 / alpha)
    stakes = np.array(BETS)[:, None]
    gain, loss = np.log1p(stakes * (1 / limits - 1)), np.log1p(-stakes)
    crossings = np.zeros(len(tails), np.int64)
    active = np.arange(len(tails))
    hits, before = np.zeros(tails.shape, np.int64), 0
    if familiar is not None:
        before = familiar[1]
        hits = rng.multinomial(before, _categories(familiar[0]))[:, :-1].cumsum(axis=1)
    for start in range(0, inputs, BLOCK):
        counts = rng.multinomial(BLOCK, _categories(tails[active]))
        new = counts[:, :-1].cumsum(axis=1)
        capital = hits[:, None] * gain + (before + start - hits[:, None]) * loss
        possible = np.flatnonzero(
            (capital + new[:, None] * gain).max(axis=(1, 2)) >= log_limit
        )  # at most, in any order
        crossed = np.zeros(len(active), bool)
        if len(possible):
            steps = _ordered_hits(counts[possible], rng) + hits[possible, None]
            scores = betting_score(
                steps, np.broadcast_to(before + start + 1 + np.arange(BLOCK), steps.shape[:2]), limits
            )
            above = scores >= log_limit
            crossed[possible] = above.any(axis=1)
            crossings[active[crossed]] = start + 1 + above.argmax(axis=1)[crossed[possible]]
        active, hits = active[~crossed], (hits + new)[~crossed]
        if not len(active):
            break
    return crossings


def _categories(tails: Float64[np.ndarray, "s j"]) -> Float64[np.ndarray, "s c"]:
    """Return the probabilities that an input exceeds all limits, all but the highest, …, none."""
    parts = np.diff(tails, axis=1, prepend=0.0, append=1.0)
    return parts / parts.sum(axis=1, keepdims=True)


def _ordered_hits(counts: Int64[np.ndarray, "s c"], rng: np.random.Generator) -> Int64[np.ndarray, "s b j"]:
    """Return how many inputs have exceeded each limit after each input of a block, in a random order."""
    streams, categories = counts.shape
    labels = np.repeat(np.tile(np.arange(categories), streams), counts.ravel()).reshape(streams, BLOCK)
    order = rng.permuted(labels, axis=1)
    return (order[..., None] <= np.arange(categories - 1)).cumsum(axis=1)


if __name__ == "__main__":
    main()
