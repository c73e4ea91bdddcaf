"""Vector environments: the same outcomes from one process and from several, also when workers die at any time."""

import contextlib
import functools
import gc
import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from counting import Counting, exits_on_start, fails_on_start, hangs_on_start, make_file_closing
from gymnasium import spaces
from pids import family, gone, running

from onefold.errors import InputError, OnefoldError
from onefold.rl import vector_env
from onefold.rl.doom import MyWayHome
from onefold.rl.env_table import Steps, episode_seed
from onefold.rl.small_envs import DeceptiveChain
from onefold.rl.vector_env import LocalVectorEnv, VectorEnv, WorkerVectorEnv
from onefold.rl.worker import Worker, WorkerTask, current_core

SEED = 11
MakePool: TypeAlias = Callable[..., WorkerVectorEnv]


def my_way_home(number: int) -> MyWayHome:
    del number
    return MyWayHome("dense")


@pytest.fixture
def make_pool() -> Iterator[Callable[..., WorkerVectorEnv]]:
    """Make pools of workers that are closed after the test."""
    pools: list[WorkerVectorEnv] = []

    def make(*args, **settings) -> WorkerVectorEnv:
        pools.append(WorkerVectorEnv(*args, **settings))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


class Witness:
    """Plays the same episodes in environments of its own, and compares every outcome."""

    def __init__(self, pool: VectorEnv) -> None:
        self.pool = pool
        self.envs = [Counting(i) for i in range(pool.count)]
        self.episodes = np.full(pool.count, -1)
        self.ended = np.ones(pool.count, bool)
        self.lost = self.steps = 0

    def check(self, actions: np.ndarray | None, steps: Steps) -> None:
        """Assert that these are the outcomes of the actions; None stands for a reset."""
        episodes = self.pool.episodes()
        for i, env in enumerate(self.envs):
            if actions is None or self.ended[i] or steps.lost[i]:
                assert steps.began[i]
                assert episodes[i] >= self.episodes[i] + 1 if steps.lost[i] else episodes[i] == self.episodes[i] + 1
                frame, info = env.reset(seed=episode_seed(SEED, i, int(episodes[i])))
                ends = (0.0, False, False)
            else:
                assert not steps.began[i]
                assert episodes[i] == self.episodes[i]
                frame, *ends, info = env.step(actions[i])
            assert steps.frames[i].tolist() == frame.tolist()
            assert (steps.rewards[i], steps.terminated[i], steps.truncated[i]) == tuple(ends)
            np.testing.assert_array_equal(steps.positions[i], info.get("position", [np.nan, np.nan]))
            self.ended[i] = any(ends[1:])
        self.episodes = episodes
        self.lost += int(steps.lost.sum())
        self.steps += 1

    def play(self, steps: int, rng: np.random.Generator) -> None:
        for _ in range(steps):
            actions = rng.integers(self.pool.actions, size=self.pool.count)
            self.pool.send(actions)
            assert (self.pool.episodes() == self.episodes).all()  # nothing changes before it is collected
            self.check(actions, self.pool.collect())


def worker_pids(pool: WorkerVectorEnv) -> list[int]:
    return [worker.pid for worker in pool._workers]


@pytest.mark.parametrize(
    "make", [lambda: LocalVectorEnv(Counting, 5, SEED), lambda: WorkerVectorEnv(Counting, 5, SEED, workers=2)]
)
def test_outcomes_depend_on_seed_and_actions_only(make: Callable[[], VectorEnv]) -> None:
    pool, rng = make(), np.random.default_rng(0)
    assert (pool.count, pool.frame, pool.dtype, pool.actions) == (5, (3, 4), np.uint8, 5)
    for _ in range(2):  # a reset starts again
        witness = Witness(pool)
        witness.check(None, pool.reset())
        witness.play(300, rng)
        assert witness.episodes.min() > 10
        assert witness.lost == 0
    pool.close()
    pool.close()


@pytest.mark.parametrize("workers", [3, 20])
def test_workers_and_one_process_have_the_same_outcomes(workers: int, make_pool: MakePool) -> None:
    pools, rng = (
        [LocalVectorEnv(Counting, 7, SEED), make_pool(Counting, 7, SEED, workers=workers)],
        np.random.default_rng(workers),
    )
    same(*(pool.reset() for pool in pools))
    for _ in range(60):
        actions = rng.integers(5, size=7)
        for pool in pools:
            pool.send(actions)
        same(*(pool.collect() for pool in pools))
    assert pools[1].count == 7
    assert len(worker_pids(pools[1])) == min(workers, 7)  # pyright: ignore[reportArgumentType]


def test_the_worker_on_the_owners_core_is_woken_last(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert current_core() in os.sched_getaffinity(0)
    pool, woken, step = make_pool(Counting, 4, SEED, workers=4), [], Worker.step
    pool.reset()
    monkeypatch.setattr(Worker, "step", lambda self: (woken.append(self.core), step(self)))
    for here in {worker.core for worker in pool._workers}:
        monkeypatch.setattr(vector_env, "current_core", lambda here=here: here)
        pool.send(np.zeros(4, np.int64))
        pool.collect()
        assert len(woken) == 4
        assert woken == sorted(woken, key=lambda other: other == here)
        woken.clear()


def same(first: Steps, second: Steps) -> None:
    for name, ours, theirs in zip(Steps._fields, first, second, strict=True):
        assert ours.dtype == theirs.dtype, name
        np.testing.assert_array_equal(ours, theirs, err_msg=name)


def test_doom_in_workers_equals_doom_in_one_process(make_pool: MakePool) -> None:
    local, pool = LocalVectorEnv(my_way_home, 4, SEED), make_pool(my_way_home, 4, SEED, workers=2)
    rng = np.random.default_rng(0)
    same(local.reset(), pool.reset())
    for _ in range(150):
        actions = rng.integers(3, size=4)
        local.send(actions)
        pool.send(actions)
        same(local.collect(), pool.collect())
    local.close()


def test_environments_and_seeds_differ() -> None:
    firsts = [LocalVectorEnv(my_way_home, 3, seed) for seed in (1, 2)]
    frames = np.concatenate([pool.reset().frames for pool in firsts])
    for pool in firsts:
        pool.close()
    assert len({frame.tobytes() for frame in frames}) == 6
    seeds = {episode_seed(s, e, k) for s in range(10) for e in range(20) for k in range(50)}
    assert len(seeds) == 10_000


def test_outcomes_are_copies() -> None:
    pool = LocalVectorEnv(Counting, 2, SEED)
    first = pool.reset()
    kept = first.frames.copy()
    pool.send(np.array([1, 2]))
    pool.collect()
    assert (first.frames == kept).all()


def test_observations_may_be_vectors_of_floats(make_pool: MakePool) -> None:
    pool = make_pool(chain, 3, SEED, workers=2)
    assert pool.dtype == np.float32
    assert pool.reset().frames.tolist() == [[1, 1, 0, 0]] * 3
    pool.send(np.array([0, 1, 1]))
    assert pool.collect().frames.tolist() == [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0]]


def chain(number: int) -> DeceptiveChain:
    del number
    return DeceptiveChain(4)


@pytest.mark.parametrize("kills", [8, pytest.param(150, marks=pytest.mark.slow)])
def test_killing_workers_at_any_time_mixes_up_no_outcomes(kills: int, make_pool: MakePool) -> None:
    """Workers die at random times, some while another one is being restarted."""
    pool = make_pool(functools.partial(Counting, slow=0.0003), 6, SEED, workers=3)
    witness, rng, done = Witness(pool), np.random.default_rng(0), threading.Event()

    def kill() -> None:
        chance = random.Random(0)
        while not done.is_set():
            for early in (False, chance.random() < 0.3):  # never two early ones: five failures in a row end the run
                steps = witness.steps
                while not early and witness.steps < steps + 3 and not done.wait(0.001):
                    pass
                done.wait(chance.uniform(0, 0.01 if early else 0.05))
                with contextlib.suppress(ProcessLookupError):  # dead, and not restarted yet
                    os.kill(chance.choice(worker_pids(pool)), signal.SIGKILL)

    until = time.monotonic() + 100 + 50 * kills
    witness.check(None, pool.reset())
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        while witness.lost < 2 * kills and time.monotonic() < until:
            witness.play(1, rng)
    finally:
        done.set()
        killer.join()
    witness.play(100, rng)
    assert witness.lost >= 2 * kills
    assert witness.lost % 2 == 0  # both environments of a worker
    assert pool.restarts >= witness.lost / 2


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ("hang", "no response within 10 s"),
        ("raise", "ValueError: no such move"),
        ("die", "ended with exit code 3"),
        ("exit", "SystemExit"),
    ],
)
def test_a_failing_worker_is_restarted(
    failure: str,
    reason: str,
    tmp_path: Path,
    make_pool: MakePool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = make_pool(functools.partial(Counting, trouble=tmp_path), 4, SEED, workers=2, timeout=10.0)
    witness, rng, before = Witness(pool), np.random.default_rng(0), worker_pids(pool)
    witness.check(None, pool.reset())
    witness.play(5, rng)
    (tmp_path / f"3-{failure}").touch()
    with caplog.at_level(logging.WARNING):
        witness.play(40, rng)
    assert [record.getMessage() for record in caplog.records] == [f"worker 1 of 2: restarted ({reason})"]
    assert (pool.restarts, witness.lost) == (1, 2)
    assert worker_pids(pool)[0] == before[0]
    assert gone(before[1:])


def test_an_environment_cannot_end_the_program(tmp_path: Path) -> None:
    pool = LocalVectorEnv(functools.partial(Counting, trouble=tmp_path), 2, SEED)
    pool.reset()
    (tmp_path / "1-exit").touch()
    pool.send(np.zeros(2, np.int64))
    with pytest.raises(OnefoldError, match=r"^environment: raised SystemExit\.$"):
        pool.collect()


def test_a_worker_that_closes_its_pipes_without_exiting_is_killed_and_restarted(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its environment closes all files of the process, including the pipes."""
    monkeypatch.setattr("onefold.rl.worker.STOP_SECONDS", 0.2)
    pool = make_pool(make_file_closing, 1, SEED, workers=1)
    pool.reset()
    with caplog.at_level(logging.WARNING):
        pool.send(np.zeros(1, np.int64))
        assert pool.collect().lost.all()
    assert caplog.messages == ["worker 0 of 1: restarted (closed its pipe and did not end within 0.2 s)"]


def test_a_suspended_worker_is_restarted(make_pool: MakePool) -> None:
    pool = make_pool(Counting, 4, SEED, workers=2, timeout=10.0)
    witness, rng, before = Witness(pool), np.random.default_rng(0), worker_pids(pool)
    witness.check(None, pool.reset())
    os.kill(before[0], signal.SIGSTOP)
    witness.play(40, rng)
    assert (pool.restarts, witness.lost) == (1, 2)
    assert gone(before[:1])


@pytest.mark.parametrize("count", [2, 3])
def test_a_worker_may_die_while_others_are_restarted(
    count: int, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last worker had finished its step; its outcomes are lost, and all start new episodes in the same step."""
    pool = make_pool(Counting, 2 * count, SEED, workers=count)
    witness, rng, before, start = Witness(pool), np.random.default_rng(0), worker_pids(pool), pool._start_worker

    def kill_and_start(task: WorkerTask) -> Worker:
        if task.start == 0:
            os.kill(before[-1], signal.SIGKILL)
            assert gone(before[-1:])
        return start(task)

    witness.check(None, pool.reset())
    monkeypatch.setattr(pool, "_start_worker", kill_and_start)
    for pid in before[:-1]:
        os.kill(pid, signal.SIGKILL)
    assert gone(before[:-1])
    witness.play(40, rng)
    assert (pool.restarts, witness.lost) == (count, 2 * count)


def test_a_worker_that_hangs_while_starting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("START_SECONDS", "STOP_SECONDS"):
        monkeypatch.setattr(vector_env, limit, 0.3)
    with pytest.raises(OnefoldError, match=r"environments 0 to 1: do not start \(no response within 0.3 s\)"):
        WorkerVectorEnv(functools.partial(hangs_on_start, index=1), 2, SEED, workers=1, timeout=0.3)


def test_repeated_failures_of_a_worker_end_the_run(tmp_path: Path, make_pool: MakePool) -> None:
    pool = make_pool(functools.partial(Counting, trouble=tmp_path), 2, SEED, workers=1)
    pool.reset()
    (tmp_path / "die").touch()
    for _ in range(4):
        pool.send(np.zeros(2, np.int64))
        assert pool.collect().lost.all()
    pool.send(np.zeros(2, np.int64))
    with pytest.raises(OnefoldError, match=r"worker 0: failed 5 times in a row \(ended with exit code 3\)"):
        pool.collect()
    assert pool.restarts == 4
    assert worker_pids(pool) == []


def test_environments_that_do_not_start_are_errors() -> None:
    before = set(family(os.getpid()))
    with pytest.raises(OnefoldError, match=r"environments 2 to 3: do not start \(LookupError: no environment 2\)"):
        WorkerVectorEnv(functools.partial(fails_on_start, first=2), 4, SEED, workers=2)
    with pytest.raises(OnefoldError, match=r"environment 0: cannot be made \(LookupError: no environment 0\)"):
        WorkerVectorEnv(functools.partial(fails_on_start, first=0), 4, SEED, workers=2)
    with pytest.raises(OnefoldError, match=r"environment 0: cannot be made \(SystemExit: no licence for 0\)"):
        LocalVectorEnv(exits_on_start, 4, SEED)
    with pytest.raises(OnefoldError, match="worker: cannot be started"):
        WorkerVectorEnv(lambda number: Counting(number), 4, SEED, workers=2)
    helper = {pid for pid in family(os.getpid()) if "resource_tracker" in Path(f"/proc/{pid}/cmdline").read_text()}
    assert set(family(os.getpid())) - before - helper == set()


@pytest.mark.parametrize(
    "make", [lambda: LocalVectorEnv(Counting, 6, SEED), lambda: WorkerVectorEnv(Counting, 6, SEED, workers=2)]
)
def test_restored_environments_continue_exactly(make: Callable[[], VectorEnv]) -> None:
    pool, again, rng = make(), make(), np.random.default_rng(3)
    steps, replayed, ended = pool.reset(), [[] for _ in range(6)], 0
    for i in range(60):
        if i % 7 == 3:
            again.restore(pool.episodes(), replayed)
            ended += int((steps.terminated | steps.truncated).sum())
            ahead = rng.integers(5, size=(4, 6))
            for actions in ahead:
                again.send(actions)
                pool.send(actions)
                same(again.collect(), steps := pool.collect())
                note(replayed, actions, steps)
        actions = rng.integers(5, size=6)
        pool.send(actions)
        steps = pool.collect()
        note(replayed, actions, steps)
    assert ended > 0  # some were restored between two episodes
    pool.close()
    again.close()


def note(replayed: list[list[int]], actions: np.ndarray, steps: Steps) -> None:
    """Keep the actions of each environment's current episode."""
    for i in range(len(replayed)):
        replayed[i] = [] if steps.began[i] else [*replayed[i], int(actions[i])]


def test_restored_doom_continues_exactly() -> None:
    pool, again = LocalVectorEnv(my_way_home, 2, SEED), LocalVectorEnv(my_way_home, 2, SEED)
    rng = np.random.default_rng(0)
    pool.reset()
    actions = rng.integers(3, size=(120, 2))
    for row in actions[:80]:
        pool.send(row)
        pool.collect()
    again.restore(pool.episodes(), actions[:80].T.tolist())
    for row in actions[80:]:
        for each in (pool, again):
            each.send(row)
        same(pool.collect(), again.collect())
    pool.close()
    again.close()


def test_a_worker_that_dies_during_restore_is_an_error(tmp_path: Path, make_pool: MakePool) -> None:
    pool = make_pool(functools.partial(Counting, trouble=tmp_path), 2, SEED, workers=2)
    (tmp_path / "1-die").touch()
    with pytest.raises(OnefoldError, match="Restore them again"):
        pool.restore(np.array([4, 5]), [[1], [2]])
    pool.restore(np.array([4, 5]), [[1], [2]])
    assert pool.episodes().tolist() == [4, 5]


def test_misuse_is_refused() -> None:
    pool = LocalVectorEnv(Counting, 2, SEED)
    pool.reset()
    for actions in ([0], [0, 5], [0, -1]):
        with pytest.raises(InputError, match="must be 2 integers from 0 to 4"):
            pool.send(np.array(actions))
    with pytest.raises(InputError, match="no step was started"):
        pool.collect()
    pool.send(np.array([0, 0]))
    with pytest.raises(InputError, match="not collected"):
        pool.send(np.array([0, 0]))
    pool.collect()
    for episodes, replayed in (([0], [[]]), ([0, -1], [[], []]), ([0, 0], [[], [], []])):
        with pytest.raises(InputError, match="each of 2 environments"):
            pool.restore(np.array(episodes), replayed)
    with pytest.raises(InputError, match="from 0 to 4"):
        pool.restore(np.array([0, 0]), [[0], [7]])
    with pytest.raises(InputError, match="do not belong"):
        pool.restore(np.array([0, 0]), [[1] * 40, []])
    for count, workers, timeout in ((0, 1, 1.0), (1, 0, 1.0), (1, 1, 0.0)):
        with pytest.raises(InputError, match="must be positive"):
            WorkerVectorEnv(Counting, count, SEED, workers=workers, timeout=timeout)


@pytest.mark.parametrize(
    ("space", "match"),
    [("observation_space", r"must be a Box \(got MultiBinary"), ("action_space", "Discrete")],
)
def test_unsupported_spaces_are_refused(space: str, match: str) -> None:
    def make(number: int) -> Counting:
        env = Counting(number)
        setattr(env, space, spaces.MultiBinary(3))
        return env

    with pytest.raises(InputError, match=match):
        LocalVectorEnv(make, 1, SEED)


def test_more_than_256_actions_are_refused() -> None:
    def make(number: int) -> Counting:
        env = Counting(number)
        env.action_space = spaces.Discrete(257)
        return env

    with pytest.raises(InputError, match=r"must be at most 256 \(got 257\)"):
        LocalVectorEnv(make, 1, SEED)


def test_a_closed_pool_cannot_be_used() -> None:
    pool = WorkerVectorEnv(Counting, 2, SEED, workers=2)
    pids = worker_pids(pool)
    pool.close()
    pool.close()
    assert gone(pids, 0.0)
    with pytest.raises(InputError, match="closed"):
        pool.reset()


def test_a_deleted_pool_stops_its_workers() -> None:
    pool = WorkerVectorEnv(Counting, 2, SEED, workers=2)
    pids = worker_pids(pool)
    del pool
    gc.collect()
    assert gone(pids)


def test_a_killed_workers_games_end_too(make_pool: MakePool) -> None:
    """The games share memory without a name, so none is left behind."""
    pool = make_pool(my_way_home, 2, SEED, workers=2)
    pool.reset()
    worker = worker_pids(pool)[0]
    games = family(worker)
    assert games
    os.kill(worker, signal.SIGKILL)
    pool.send(np.zeros(2, np.int64))
    assert pool.collect().lost.tolist() == [True, False]
    assert gone([worker, *games])
    everyone = [pid for worker in worker_pids(pool) for pid in [worker, *family(worker)]]
    assert len(everyone) == 4
    pool.close()
    assert gone(everyone)


SCRIPT = """
    import signal, sys, time
    import numpy as np
    from onefold.rl.vector_env import WorkerVectorEnv
    from test_vector import my_way_home, worker_pids, family

    if __name__ == "__main__":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
        pool = WorkerVectorEnv(my_way_home, 2, 0, workers=2)
        pool.reset()
        print(*(pid for worker in worker_pids(pool) for pid in [worker, *family(worker)]), flush=True)
        while sys.argv[1] == "go on":
            pool.send(np.zeros(2, np.int64))
            pool.collect()
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, None])
def test_workers_end_with_their_owner(end: signal.Signals | None, tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(textwrap.dedent(SCRIPT))
    owner = subprocess.Popen(
        [sys.executable, str(script), "stop" if end is None else "go on"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
            "JAXTYPING_DISABLE": "1",
        },
    )
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 4
    if end is not None:
        assert all(map(running, pids))
        time.sleep(0.2)
        os.killpg(owner.pid, end)  # as Ctrl-C does
    try:
        _, errors = owner.communicate(timeout=600)
    finally:
        owner.kill()  # and its workers end with it
    assert owner.returncode == (0 if end is None else -end)
    assert gone(pids)
    assert (errors == "") == (end != signal.SIGINT)
    assert errors.count("Traceback") == (end == signal.SIGINT)
