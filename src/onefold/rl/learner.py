"""The learner: remember, act, learn. On a GPU each is captured once and replayed, and nothing asks the host."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Generator, Tensor

from onefold.errors import FileError, TrainingError
from onefold.methods.prior import generators
from onefold.nets import fuse
from onefold.rl.agents import Agent, Learning
from onefold.rl.host import Host
from onefold.rl.novelty import CSDNovelty, Novelty, Scale, novelty_of, rewarded, standardise_by
from onefold.rl.replay import Drawn, Replay
from onefold.rl.returns import picked
from onefold.rl.values import Said, Values, judged, preferences, worth
from onefold.rl.vector import Steps
from onefold.streams import replayed, side_by_side

COMPILED: dict[str, Any] = {"combo_kernels": True}  # the many small ones that convert weights become few
CENTRE = 4096  # stacks of frames, the mean of which the bonus's features are seen from
STATISTICS = ("loss", "bonus_loss", "bonus", "value", "outside", "error", "gradient")


class Learner:
    """An agent's networks, memory and optimiser, and what it does with them.

    All randomness comes from one generator on the device; schedules follow the replay's own count of frames, so that a
    step depends on nothing but `tensors()`.
    """

    def __init__(
        self,
        agent: Agent,
        learning: Learning,
        *,
        environments: int,
        frame: tuple[int, ...],
        dtype: torch.dtype,
        actions: int,
        seed: int,
        device: torch.device,
        captured: bool = True,
        compiled: bool = False,
        fused: bool = True,
    ) -> None:
        self.agent, self.learning, self.device, self.actions = agent, learning, device, actions
        memory, on_gpu = learning.memory, device.type == "cuda"
        self.replay = Replay(memory, environments, frame, dtype, device)
        shape = memory.shape(frame)
        weights, curious, chance = generators(seed, 3)
        self.values = Values(agent, learning, shape, actions, weights).to(device)
        self.target = Values(agent, learning, shape, actions, weights).to(device).requires_grad_(False)
        self.bonus: Any = novelty_of(agent, shape, actions, curious)
        self.bonus = None if self.bonus is None else self.bonus.to(device)
        for module in (self.values, self.target, self.bonus):
            if module is not None and fused:
                fuse(module, device)
        self.scale = Scale().to(device)
        self.chance = Generator(device).manual_seed(chance.initial_seed())
        self.member = torch.zeros(environments, dtype=torch.int64, device=device)
        self.statistics = torch.zeros(len(STATISTICS) + 1, device=device)
        self.updates = 0
        self._own = [p for p in self.values.parameters() if p.requires_grad]
        compiler: Any = functools.partial(torch.compile, dynamic=False, options=COMPILED)
        quick: Any = compiler if compiled else lambda part: part
        # torch's own fused step has a block for 65,536 weights, 23 in all: compiled, it takes a tenth of the time
        how = {"foreach": True} if compiled else {"fused": True}
        adam = functools.partial(torch.optim.Adam, eps=learning.adam_eps, capturable=on_gpu, **how)
        self.optimisers = [adam(self._own, lr=agent.lr)]
        if self.bonus is not None:
            curious_own = [p for p in self.bonus.parameters() if p.requires_grad]
            self.optimisers.append(adam(curious_own, lr=agent.bonus_lr))
        self.copy_target()
        self._steps = [quick(self._step), *(quick(optimiser.step) for optimiser in self.optimisers[1:])]
        self._say, self._see, self._judge, self._reward = quick(_said), quick(_saw), quick(judged), quick(rewarded)
        self._fetch = quick(self.replay.fetch)
        self._sharpen = quick(self.values.trunk.sharpen)
        self._seen = Host(environments, frame, dtype, device)
        needed = 1 + (0 if self.bonus is None else self.bonus.uniforms)
        self._uniforms = torch.zeros(learning.batch, needed, device=device)
        self._luck = torch.zeros(environments, 3, device=device)
        self._chosen = torch.zeros(environments, dtype=torch.int64, device=device)
        self._answer = torch.zeros(environments, dtype=torch.int64, pin_memory=on_gpu)
        self._answered = torch.cuda.Event() if on_gpu else None
        beside = on_gpu and not agent.untried  # whose bonus chooses, too, and is about to change
        self._aside = torch.cuda.Stream(device) if beside else None
        self._acting = copy.deepcopy(self.values).requires_grad_(False) if beside else self.values
        parts = (self._remembered, self._acted, self._learned, self._followed)
        self._remember, self._act, self._learn, self._follow = (
            replayed(part, device) if on_gpu and captured else part for part in parts
        )

    @property
    def frames(self) -> Tensor:
        """How many frames the environments have made, on the device."""
        return (self.replay.head + 1) * self.replay.environments

    def observe(self, steps: Steps) -> None:
        """Remember what came of the last actions, and choose the next ones.

        A GPU goes on with it by itself, and chooses while it learns: by a copy of the values as they were before.
        """
        if self._answered is not None:
            self._answered.wait()
        self._seen.take(steps)
        self._luck.uniform_(generator=self.chance)
        self._remember()
        if self._aside is not None:
            self._aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._aside):
            self._act()
            self._answer.copy_(self._chosen, non_blocking=True)
            if self._answered is not None:
                self._answered.record()

    def answer(self) -> NDArray[np.int64]:
        """What was chosen. On a GPU this waits for the choice, and not for what was asked of it after that."""
        if self._answered is not None:
            self._answered.synchronize()
        return self._answer.numpy().copy()

    def learn(self) -> None:
        """One update of everything from one minibatch."""
        if self.updates == 0 and self.bonus is not None:
            self._settle()
        self._uniforms.uniform_(generator=self.chance)
        self._learn()
        if self._aside is not None and self._answered is not None:
            self._answered.wait()
            self._follow()
        self.updates += 1

    @torch.no_grad()
    def copy_target(self) -> None:
        """Move the target to where the values are."""
        for mine, own in zip(self.target.parameters(), self.values.parameters(), strict=True):
            mine.copy_(own)

    def report(self) -> dict[str, float]:
        """Means since the last report."""
        self.check()
        *sums, count = self.statistics.tolist()
        self.statistics.zero_()
        return {name: total / max(1.0, count) for name, total in zip(STATISTICS, sums, strict=True)}

    def check(self) -> None:
        """End the run if there is anything that is no number."""
        if not all(t.isfinite().all() for t in (self.statistics, *(parameter for _, parameter in self._moved()))):
            raise TrainingError(
                "the loss is no number any more; the last checkpoint is good. agent.lr or agent.bonus_lr is too large, "
                "or the environment gives what is no number: train anew in another folder with smaller ones"
            )

    def close(self) -> None:
        """Let go of everything: it refers to itself, and gigabytes would stay until Python looks for such circles."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # nothing may be at work in memory that is given back
        self.__dict__.clear()

    def networks(self) -> dict[str, Tensor]:
        """What it takes to act."""
        return {f"values.{name}": t for name, t in self.values.state_dict().items()}

    def tensors(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, the replay apart. What was chosen is in both by then."""
        if self._answered is not None:
            self._answered.synchronize()
        found = self.networks()
        found |= {f"target.{name}": t for name, t in self.target.state_dict().items()}
        found |= {f"scale.{name}": t for name, t in self.scale.state_dict().items()}
        found |= {"member": self.member, "chance": self.chance.get_state(), "updates": torch.tensor(self.updates)}
        found["statistics"] = self.statistics
        if self.bonus is not None:
            found |= {f"bonus.{name}": t for name, t in self.bonus.state_dict().items()}
        for i, (optimiser, parameter) in enumerate(self._moved()):
            found |= {f"adam.{i}.{key}": value for key, value in optimiser.state[parameter].items()}
        return found

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Go on from `tensors()` of a learner of the same form, on the same kind of device."""
        if tensors["chance"].shape != self.chance.get_state().shape:
            raise FileError("a run on a GPU cannot be gone on with on a CPU, nor the other way round")
        modules = {"values": self.values, "target": self.target, "scale": self.scale, "bonus": self.bonus}
        for prefix, module in modules.items():
            if module is not None:
                own = {n.removeprefix(f"{prefix}."): t for n, t in tensors.items() if n.startswith(f"{prefix}.")}
                module.load_state_dict(own)
        self._followed()
        self.member.copy_(tensors["member"])
        self.statistics.copy_(tensors["statistics"])
        self.chance.set_state(tensors["chance"].cpu())
        self.updates = int(tensors["updates"])
        self._answer.copy_(self.replay.actions[int(self.replay.head) % self.replay.length])
        for i, (optimiser, parameter) in enumerate(self._moved()):
            own = {n.split(".", 2)[2]: t for n, t in tensors.items() if n.startswith(f"adam.{i}.")}
            optimiser.state[parameter] = {key: _placed(value, parameter) for key, value in own.items()}

    def _settle(self) -> None:
        """Let the bonus see everything in the light of what has been seen before learning begins."""
        seen = self.replay.frames[: int(self.replay.head) + 1].flatten(0, 1)
        standardise_by(self.bonus.first, _pairs(seen, self.actions) if self.agent.untried else _prepared(seen))
        if isinstance(self.bonus, CSDNovelty) and seen.ndim == 3:
            evenly = torch.full((CENTRE,), 0.5, device=self.device)
            self.bonus.centre_on(_prepared(self.replay.fetch(*self.replay.pick(evenly, 0.0)).states))

    def _moved(self) -> list[tuple[torch.optim.Adam, Tensor]]:
        """Every parameter that learns, with its optimiser."""
        return [(optimiser, p) for optimiser in self.optimisers for p in optimiser.param_groups[0]["params"]]

    def _remembered(self) -> None:
        seen = self._seen
        self.replay.add(seen.frames, seen.rewards, *seen.flags)

    @torch.no_grad()
    def _acted(self) -> None:
        began, members = self._seen.flags[2], max(1, self.agent.members)
        self.member.copy_(torch.where(began, (self._luck[:, 0] * members).long(), self.member))
        weight = self.agent.weight.at(self.frames)
        with self._autocast():
            said = self._say(self._acting, self.replay.newest())
        liked = preferences(self.agent, said, self.member, weight)
        if self.agent.untried:
            liked = liked + self._hopes(self.replay.newest())
        best = liked.argmax(1)
        at_random = (self._luck[:, 1] * self.actions).long()
        self._chosen.copy_(torch.where(self._luck[:, 2] < self.learning.epsilon.at(self.frames), at_random, best))
        self.replay.act(self._chosen)

    def _learned(self) -> None:
        pick, importance = self.replay.pick, self.learning.importance.at(self.frames)
        places, _ = side_by_side([lambda: pick(self._uniforms[:, 0], importance), self._sharpen], self.device)
        drawn = self._fetch(*places)
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        with torch.enable_grad(), torch.backends.cudnn.flags(enabled=True, benchmark=True):
            said, after, target, news, curious = self._passes(drawn)
            rewards, weight = drawn.rewards[None], self.agent.weight.at(self.frames)
            if self.bonus is not None:
                rewards = self._reward(self.agent, self.scale, news, weight, drawn.rewards)
            hopes = self._hopes(drawn.next_states) if self.agent.untried else None
            found = self._judge(self.agent, said, drawn.actions, rewards, drawn.discounts, after, target, weight, hopes)
            loss = (drawn.weights * found.loss).mean()
            (loss + curious).backward()

        def tallied() -> list[Tensor]:
            self.replay.reprioritise(drawn.slots, found.error)
            value = worth(self.agent, said, weight).amax(1).mean()
            return [loss, curious, news.mean(), value, found.outside, found.error.mean()]

        sums, norm, *_ = side_by_side([tallied, *self._steps], self.device)
        self.statistics.add_(torch.stack([*sums, norm, torch.ones_like(norm)]).detach())

    @torch.no_grad()
    def _followed(self) -> None:
        """Let the next actions be chosen by the values as they are now."""
        copies, values = (list(module.state_dict().values()) for module in (self._acting, self.values))
        torch._foreach_copy_(copies, values)  # pyright: ignore[reportPrivateImportUsage]

    def _passes(self, drawn: Drawn) -> tuple[Said, Said, Said, Tensor, Tensor]:
        """What the networks say of both sides of the transitions, how new the next states are, and the bonus's loss."""
        x, y = drawn.states, drawn.next_states
        no_grad, nothing = torch.no_grad(), torch.zeros((), device=self.device)
        functions: list[Callable[[], Any]] = [
            lambda: self._say(self.values, x),
            lambda: no_grad(self._say)(self.values, y),
            lambda: no_grad(self._say)(self.target, y),
        ]
        if self.bonus is not None:
            new = picked(_pairs(x, self.actions), drawn.actions) if self.agent.untried else y
            functions.append(lambda: self._see(self.bonus, new, self._uniforms[:, 1:]))
        with self._autocast():
            said, after, target, *others = side_by_side(functions, self.device)
        news, curious = others[0] if others else (nothing[None], nothing)
        return said, after, target, news, curious

    def _hopes(self, x: Tensor) -> Float[Tensor, "n actions"]:
        """What each action is worth for being new."""
        news = self.bonus.value(_pairs(x, self.actions).flatten(0, 1)).view(len(x), self.actions)
        return self.agent.weight.at(self.frames) * news

    def _step(self) -> Tensor:
        """Move the values, and say how long the gradient was."""
        norm = torch.nn.utils.clip_grad_norm_(self._own, self.learning.clip, foreach=True)
        self.optimisers[0].step()
        return norm

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda", cache_enabled=False)


def _said(values: Values, x: Tensor) -> Said:
    return values(_prepared(x))


def _saw(bonus: Novelty, x: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    return bonus.seen(_prepared(x), uniforms)


def _prepared(x: Tensor) -> Tensor:
    """Bytes as numbers between 0 and 1."""
    return x.float() / 255 if x.dtype == torch.uint8 else x


def _pairs(x: Float[Tensor, "n d"], actions: int) -> Float[Tensor, "n actions pair"]:
    """Every state with every action: the state in the action's own columns, nothing in the others."""
    return torch.einsum("nd,ab->nabd", _prepared(x), torch.eye(actions, device=x.device)).flatten(2)


def _placed(value: Tensor, parameter: Tensor) -> Tensor:
    """Adam's state where Adam wants it: moments beside their parameter, in its layout; its count there if captured."""
    if value.shape == parameter.shape and value.ndim > 0:
        return torch.empty_like(parameter).copy_(value)
    return value.to(parameter.device)
