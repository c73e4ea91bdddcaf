"""What a bonus is worth to agents of stable-baselines3: no bonus, RND and CSD in two hard worlds, on a CPU.

    python benchmarks/bonuses.py [-o results/bonuses] [--tasks chain rooms] [--workers 2]

DQN on the deceptive chain of 40; PPO on MiniGrid's MultiRoom-N6: six rooms with closed doors, always the same ones.
Each bonus is tuned with the same budget: one run for each of `BETAS` × `RATES` with a seed of its own, the best by the
mean return of the whole run; then five seeds with its settings. CSD's bonus is a share and RND's in deviations, so that
their weights are not of one size: each has a hundredfold range. A run is one file; runs that are there are skipped, so
that the same command goes on after a stop. The time that the bonus takes is measured in every run.
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from onefold.core.provenance import provenance
from onefold.core.storage import write_json
from onefold.rl.bonus import CSDBonus, RNDBonus
from onefold.rl.small_envs import DeceptiveChain

SEEDS, TUNING_SEED = range(5), 100
BETAS = {
    "chain": {"rnd": (0.03, 0.3, 3.0), "csd": (0.1, 1.0, 10.0)},
    "rooms": {"rnd": (0.001, 0.01, 0.1), "csd": (0.01, 0.1, 1.0)},
}
RATES = (1e-3, 3e-3)
STEPS = {"chain": 15_000, "rooms": 400_000}
LAYOUT = 1  # which six rooms
BINS = 40
BONUSES: dict[str, Any] = {"none": None, "rnd": RNDBonus, "csd": CSDBonus}


class Timed:
    """A bonus, and the seconds that it takes."""

    def __init__(self, bonus: Any) -> None:
        self.bonus, self.seconds = bonus, 0.0

    def __call__(self, observations: Any) -> torch.Tensor:
        return self._measured(self.bonus, observations)

    def update(self, observations: Any) -> float:
        return self._measured(self.bonus.update, observations)

    def _measured(self, work: Callable[[Any], Any], observations: Any) -> Any:
        started = time.perf_counter()
        found = work(observations)
        self.seconds += time.perf_counter() - started
        return found


class OneHot(gymnasium.ObservationWrapper[np.ndarray, Any, np.ndarray]):
    """MiniGrid's view of 7 × 7 cells, each of three numbers, as ones and zeros: 11 objects, 6 colours, 3 states."""

    SIZES = (11, 6, 3)

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(0, 1, (49 * sum(self.SIZES),), np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        parts = [np.eye(size, dtype=np.float32)[observation[..., k]] for k, size in enumerate(self.SIZES)]
        return np.concatenate(parts, -1).reshape(-1)


class Same(gymnasium.Wrapper[Any, Any, Any, Any]):
    """The same rooms in every episode."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        del seed
        return self.env.reset(seed=LAYOUT, options=options)


def rooms() -> Any:
    # No part of what developers install: only this benchmark needs it.
    import minigrid  # noqa: F401  # pyright: ignore[reportMissingImports]
    from minigrid.wrappers import ImgObsWrapper  # pyright: ignore[reportMissingImports]

    return OneHot(ImgObsWrapper(Same(gymnasium.make("MiniGrid-MultiRoom-N6-v0"))))


def learner(task: str, bonus: Timed | None, beta: float, seed: int) -> tuple[Any, list[Any]]:
    """An algorithm with settings that are the same with every bonus, and its callbacks."""
    from stable_baselines3 import DQN, PPO
    from stable_baselines3.common.env_util import make_vec_env

    from onefold.rl.sb3 import IntrinsicCallback, IntrinsicReplayBuffer

    nets = {"net_arch": [64, 64]}
    if task == "chain":
        how: dict[str, Any] = {}
        if bonus is not None:
            how = {"replay_buffer_class": IntrinsicReplayBuffer, "replay_buffer_kwargs": {"bonus": bonus, "beta": beta}}
        model = DQN(
            "MlpPolicy", make_vec_env(lambda: DeceptiveChain(40), 1, seed=seed), learning_rate=1e-3,
            learning_starts=500, train_freq=1, target_update_interval=200, exploration_fraction=0.3,
            exploration_final_eps=0.02,
            batch_size=64, buffer_size=STEPS[task], seed=seed, device="cpu", policy_kwargs=nets, **how,
        )  # fmt: skip
        return model, []
    model = PPO(
        "MlpPolicy", make_vec_env(rooms, 16, seed=seed), n_steps=128, batch_size=256, n_epochs=4, learning_rate=7e-4,
        ent_coef=0.01, seed=seed, device="cpu", policy_kwargs=nets,
    )  # fmt: skip
    return model, [] if bonus is None else [IntrinsicCallback(bonus, beta=beta)]


def run(task: str, name: str, beta: float, rate: float, seed: int) -> dict[str, Any]:
    """Train once: returns of episodes in bins of steps, and how long it took."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Episodes(BaseCallback):
        rows: list[tuple[int, float]]

        def _on_training_start(self) -> None:
            self.rows = []

        def _on_step(self) -> bool:
            ended = [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
            self.rows += [(self.num_timesteps, float(reward)) for reward in ended]
            return True

    torch.set_num_threads(1)
    kind, steps = BONUSES[name], STEPS[task]
    bonus = None if kind is None else Timed(kind(lr=rate, seed=seed, device="cpu"))
    model, callbacks = learner(task, bonus, beta, seed)
    episodes = Episodes()
    started = time.perf_counter()
    model.learn(steps, callback=[*callbacks, episodes])
    seconds = time.perf_counter() - started
    at, returns = (np.array(column, float) for column in zip(*episodes.rows, strict=True))
    place = np.minimum((at / steps * BINS).astype(int), BINS - 1)
    curve = [float(returns[place == b].mean()) if (place == b).any() else None for b in range(BINS)]
    return {
        **provenance(torch.device("cpu")),
        "task": task, "bonus": name, "beta": beta, "rate": rate, "seed": seed, "steps": steps,
        "episodes": len(returns), "mean_return": float(returns.mean()), "curve": curve,
        "last_tenth": float(returns[at > 0.9 * steps].mean()), "seconds": seconds,
        "bonus_seconds": 0.0 if bonus is None else bonus.seconds,
    }  # fmt: skip


def kept(job: tuple[Path, str, str, float, float, int]) -> dict[str, Any]:
    """The run's file, made if it is not there or of another length."""
    import json

    folder, task, name, beta, rate, seed = job
    path = folder / task / f"{name}-{beta:g}-{rate:g}-seed{seed}.json"
    if not path.exists() or json.loads(path.read_text("utf-8"))["steps"] != STEPS[task]:
        found = run(task, name, beta, rate, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found)
        print(f"{path.stem:28} {task}: {found['mean_return']:.3f}, {found['seconds']:.0f} s", flush=True)
    return json.loads(path.read_text("utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, default=Path("results/bonuses"))
    parser.add_argument("--tasks", nargs="+", default=list(STEPS), choices=STEPS)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(options.workers, maxtasksperchild=1) as pool:
        for task in options.tasks:
            trials = [
                (options.out, task, name, beta, rate, TUNING_SEED)
                for name in ("rnd", "csd") for beta in BETAS[task][name] for rate in RATES
            ]  # fmt: skip
            found = pool.map(kept, trials, chunksize=1)
            jobs = [(options.out, task, "none", 0.0, 0.0, seed) for seed in SEEDS]
            for name in ("rnd", "csd"):
                best = max((r for r in found if r["bonus"] == name), key=lambda r: r["mean_return"])
                print(f"{task}: {name} with beta {best['beta']:g} and rate {best['rate']:g}", flush=True)
                jobs += [(options.out, task, name, best["beta"], best["rate"], seed) for seed in SEEDS]
            pool.map(kept, jobs, chunksize=1)


if __name__ == "__main__":
    main()
