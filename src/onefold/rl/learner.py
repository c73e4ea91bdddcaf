"""The learner: one agent's replay, networks and optimisers. On a GPU each phase is a CUDA graph."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Generator, Tensor

from onefold.core.moments import DecayingMoments
from onefold.core.optimisers import adam_to_tensors, restore_adam
from onefold.core.rng import generators
from onefold.core.storage import under_prefix, with_prefix
from onefold.errors import FileError, TrainingError
from onefold.nn.cuda_graphs import replayed, side_by_side
from onefold.nn.nets import fuse
from onefold.rl.agents import Agent, Learning
from onefold.rl.bonus_networks import (
    BonusNetworks,
    CSDNetworks,
    bonus_rewards,
    fit_standardise,
    make_bonus_networks,
    reset_generator,
)
from onefold.rl.replay import Batch, Replay
from onefold.rl.staging import StagingBuffer
from onefold.rl.td import QNetwork, QOutputs, action_values, q_and_u, select, td_loss
from onefold.rl.vector_env import Steps

COMPILE_OPTIONS: dict[str, Any] = {"combo_kernels": True}  # merges the many small kernels that convert weights
CENTRE_STACKS = 4096  # stacks that determine the origin of centred features
STATISTICS = (
    "loss", "bonus_loss", "bonus", "q_value", "u_value", "td_error", "per_weight", "q_clipped", "u_clipped",
    "grad_norm",
)  # fmt: skip


class Learner:
    """Replay, networks and optimisers of one agent; one update per `learn`.

    All randomness comes from one generator on the device, and schedules follow the frame count of the replay. The next
    step therefore depends on `tensors()` and the replay only. With `fused`, networks use the CUDA kernels that
    `onefold.rl.fused` registers when it is imported.
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
        self.agent, self.learning, self.device, self.actions, self.seed = agent, learning, device, actions, seed
        on_gpu = device.type == "cuda"
        self.replay = Replay(learning.replay, environments, frame, dtype, device)
        shape = learning.replay.shape(frame)
        weights, bonus_weights, noise = generators(seed, 3)
        self.online = QNetwork(agent, learning, shape, actions, weights).to(device)
        self.target = QNetwork(agent, learning, shape, actions, weights).to(device).requires_grad_(False)
        self.bonus: Any = make_bonus_networks(agent, shape, actions, bonus_weights)
        self.bonus = None if self.bonus is None else self.bonus.to(device)
        for module in (self.online, self.target, self.bonus):
            if module is not None and fused:
                fuse(module, device)
        self.bonus_moments = DecayingMoments().to(device)
        self.generator = Generator(device).manual_seed(noise.initial_seed())
        self.member = torch.zeros(environments, dtype=torch.int64, device=device)
        self.statistics = torch.zeros(len(STATISTICS) + 1, device=device)
        self.updates = 0
        self._parameters = [p for p in self.online.parameters() if p.requires_grad]
        self.optimisers = self._make_optimisers(compiled)
        self.copy_target()
        compiler: Any = functools.partial(torch.compile, dynamic=False, options=COMPILE_OPTIONS)
        fast: Any = compiler if compiled else lambda part: part
        self._optimiser_steps = [fast(self._step_networks), *(fast(o.step) for o in self.optimisers[1:])]
        self._q_outputs, self._bonus_outputs = fast(_q_outputs), fast(_bonus_outputs)
        self._td_loss, self._bonus_rewards = fast(td_loss), fast(bonus_rewards)
        self._fetch = fast(self.replay.fetch)
        self._power_iteration = fast(self.online.trunk.power_iteration)
        self._steps = StagingBuffer(environments, frame, dtype, device)
        uniforms = 1 + (0 if self.bonus is None else self.bonus.uniforms)
        self._uniforms = torch.zeros(learning.batch_size, uniforms, device=device)
        self._action_uniforms = torch.zeros(environments, 3, device=device)
        self._device_actions = torch.zeros(environments, dtype=torch.int64, device=device)
        self._host_actions = torch.zeros(environments, dtype=torch.int64, pin_memory=on_gpu)
        self._actions_ready = torch.cuda.Event() if on_gpu else None
        # Actions are selected while the networks learn, by a copy. An optimistic agent also selects by its bonus.
        separate = on_gpu and not agent.optimistic
        self._actor_stream = torch.cuda.Stream(device) if separate else None
        self._actor = copy.deepcopy(self.online).requires_grad_(False) if separate else self.online
        phases = (self._add_to_replay, self._select_actions, self._update, self._sync_actor)
        self._run_add, self._run_select, self._run_update, self._run_sync = (
            replayed(phase, device) if on_gpu and captured else phase for phase in phases
        )

    def _make_optimisers(self, compiled: bool) -> list[torch.optim.Adam]:
        """Return Adam for the networks and, with a bonus, for its networks.

        PyTorch's fused step launches one block per 65,536 weights, 23 in all; compiled, it takes a tenth of the time.
        """
        form = {"foreach": True} if compiled else {"fused": True}
        capturable = self.device.type == "cuda"
        adam = functools.partial(torch.optim.Adam, eps=self.learning.adam_eps, capturable=capturable, **form)
        optimisers = [adam(self._parameters, lr=self.agent.lr)]
        if self.bonus is not None:
            trained = [p for p in self.bonus.parameters() if p.requires_grad]
            optimisers.append(adam(trained, lr=self.agent.bonus_lr))
        return optimisers

    @property
    def frames(self) -> Tensor:
        """Frames of all environments so far, on the device."""
        return (self.replay.head + 1) * self.replay.environments

    def observe(self, steps: Steps) -> None:
        """Add the outcome of the last actions to the replay, and select the next ones.

        On a GPU this returns at once: actions are selected while the networks learn, by their previous weights.
        """
        if self._actions_ready is not None:
            self._actions_ready.wait()
        self._steps.copy(steps)
        self._action_uniforms.uniform_(generator=self.generator)
        self._run_add()
        if self._actor_stream is not None:
            self._actor_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._actor_stream):
            self._run_select()
            self._host_actions.copy_(self._device_actions, non_blocking=True)
            if self._actions_ready is not None:
                self._actions_ready.record()

    def selected_actions(self) -> NDArray[np.int64]:
        """Return the actions that `observe` selected; on a GPU, wait for the selection but not for a running update."""
        if self._actions_ready is not None:
            self._actions_ready.synchronize()
        return self._host_actions.numpy().copy()

    def learn(self) -> None:
        """Update all networks on one minibatch."""
        if self.updates == 0 and self.bonus is not None:
            self._standardise_bonus_inputs()
        self._uniforms.uniform_(generator=self.generator)
        self._run_update()
        if self._actor_stream is not None and self._actions_ready is not None:
            self._actions_ready.wait()
            self._run_sync()
        self.updates += 1

    @torch.no_grad()
    def copy_target(self) -> None:
        """Copy the online networks to the target networks."""
        for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
            target.copy_(online)

    @torch.no_grad()
    def reset_bonus(self, index: int) -> None:
        """Draw new weights for the trained bonus networks and clear their optimiser.

        The prior φ₀, the standardisation and the running moments stay.
        """
        self.bonus.reset(reset_generator(self.seed, index))
        for state in self.optimisers[1].state.values():
            for tensor in state.values():
                tensor.zero_()

    def report(self) -> dict[str, float]:
        """Return the means of the statistics since the last report."""
        self.check()
        *sums, count = self.statistics.tolist()
        self.statistics.zero_()
        return {name: total / max(1.0, count) for name, total in zip(STATISTICS, sums, strict=True)}

    def check(self) -> None:
        """Raise a TrainingError if a statistic or a weight is not finite."""
        trained = [p for o in self.optimisers for group in o.param_groups for p in group["params"]]
        if not all(tensor.isfinite().all() for tensor in (self.statistics, *trained)):
            raise TrainingError(
                "loss is NaN or infinite. The last checkpoint is intact; train in another folder with a smaller "
                "agent.lr or agent.bonus_lr, and check that the environment's observations and rewards are finite."
            )

    def close(self) -> None:
        """Free all memory now: reference cycles would keep it until the next garbage collection."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # no kernel may use memory that is freed
        self.__dict__.clear()

    def networks(self) -> dict[str, Tensor]:
        """Return the weights needed to act."""
        return with_prefix("online", self.online.state_dict())

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that the next step depends on, except the replay."""
        if self._actions_ready is not None:
            self._actions_ready.synchronize()
        tensors = {"member": self.member, "generator": self.generator.get_state()}
        tensors |= {"updates": torch.tensor(self.updates), "statistics": self.statistics}
        for prefix, module in self._modules().items():
            tensors |= with_prefix(prefix, module.state_dict())
        return tensors | with_prefix("adam", adam_to_tensors(*self.optimisers))

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Continue from `tensors()` of a learner with the same settings, on the same kind of device."""
        if tensors["generator"].shape != self.generator.get_state().shape:
            raise FileError(
                "cannot resume a GPU run on the CPU (or the reverse). Resume it on the same kind of device."
            )
        for prefix, module in self._modules().items():
            module.load_state_dict(under_prefix(prefix, tensors))
        self._sync_actor()
        self.member.copy_(tensors["member"])
        self.statistics.copy_(tensors["statistics"])
        self.generator.set_state(tensors["generator"].cpu())
        self.updates = int(tensors["updates"])
        self._host_actions.copy_(self.replay.actions[int(self.replay.head) % self.replay.length])
        restore_adam(under_prefix("adam", tensors), *self.optimisers)

    def _standardise_bonus_inputs(self) -> None:
        """Fix the standardisation of the bonus's inputs, and the origin of centred features, by the replay so far."""
        frames = self.replay.frames[: int(self.replay.head) + 1].flatten(0, 1)
        inputs = _state_actions(frames, self.actions) if self.agent.optimistic else _as_float(frames)
        fit_standardise(self.bonus.standardise, inputs)
        if isinstance(self.bonus, CSDNetworks) and self.agent.bonus_form == "centred":
            evenly = torch.full((CENTRE_STACKS,), 0.5, device=self.device)
            self.bonus.set_centre(_as_float(self.replay.fetch(*self.replay.sample(evenly, 0.0)).states))

    def _modules(self) -> dict[str, torch.nn.Module]:
        """Return the modules whose state a checkpoint contains, by prefix."""
        modules: dict[str, Any] = {"online": self.online, "target": self.target, "bonus_moments": self.bonus_moments}
        return modules if self.bonus is None else {**modules, "bonus": self.bonus}

    def _add_to_replay(self) -> None:
        self.replay.add(self._steps.frames, self._steps.rewards, *self._steps.flags)

    @torch.no_grad()
    def _select_actions(self) -> None:
        began, members = self._steps.flags[2], max(1, self.agent.members)
        new_member = (self._action_uniforms[:, 0] * members).long()
        self.member.copy_(torch.where(began, new_member, self.member))
        stacks = self.replay.newest_stacks()
        with self._autocast():
            outputs = self._q_outputs(self._actor, stacks)
        values = action_values(self.agent, outputs, self.member, self.agent.bonus_weight.at(self.frames))
        if self.agent.optimistic:
            values = values + self._action_bonus(stacks)
        random_actions = (self._action_uniforms[:, 1] * self.actions).long()
        explore = self._action_uniforms[:, 2] < self.learning.epsilon.at(self.frames)
        self._device_actions.copy_(torch.where(explore, random_actions, values.argmax(1)))
        self.replay.set_actions(self._device_actions)

    def _update(self) -> None:
        per_beta = self.learning.per_beta.at(self.frames)
        sample = functools.partial(self.replay.sample, self._uniforms[:, 0], per_beta)
        (slots, weights), _ = side_by_side([sample, self._power_iteration], self.device)
        batch = self._fetch(slots, weights)
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        with torch.enable_grad(), torch.backends.cudnn.flags(enabled=True, benchmark=True):
            online, next_online, next_target, bonus, bonus_loss = self._forward(batch)
            bonus_weight = self.agent.bonus_weight.at(self.frames)
            rewards = batch.rewards[None]
            if self.bonus is not None:
                rewards = self._bonus_rewards(self.agent, self.bonus_moments, bonus, bonus_weight, batch.rewards)
            next_bonus = self._action_bonus(batch.next_states) if self.agent.optimistic else None
            u_share = (self.frames >= self.learning.bonus_learning_starts).float()
            td = self._td_loss(
                self.agent, online, next_online, next_target, batch.actions, rewards, batch.discounts, bonus_weight,
                u_share, next_bonus,
            )  # fmt: skip
            loss = (batch.weights * td.loss).mean()
            (loss + bonus_loss).backward()

        def tally() -> list[Tensor]:
            self.replay.update_priorities(batch.slots, td.td_error)
            q, u = self._greedy_values(online, bonus_weight)
            u_clipped = td.clipped[1] if self.agent.bonus_head else torch.zeros_like(loss)
            return [
                loss, bonus_loss, bonus.mean(), q, u, td.td_error.mean(), batch.weights.mean(), td.clipped[0],
                u_clipped,
            ]  # fmt: skip

        sums, grad_norm, *_ = side_by_side([tally, *self._optimiser_steps], self.device)
        self.statistics.add_(torch.stack([*sums, grad_norm, torch.ones_like(grad_norm)]).detach())

    def _greedy_values(self, outputs: QOutputs, bonus_weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means of Q and U over the batch, at the actions that maximise Q + bonus_weight · U."""
        q, u = q_and_u(self.agent, outputs)
        if u is None:
            return q.amax(1).mean(), torch.zeros_like(q[0, 0])
        best = (q + bonus_weight * u).argmax(1, keepdim=True)
        return q.gather(1, best).mean(), u.gather(1, best).mean()

    @torch.no_grad()
    def _sync_actor(self) -> None:
        """Copy the online networks to those that select actions."""
        actor, online = (list(module.state_dict().values()) for module in (self._actor, self.online))
        torch._foreach_copy_(actor, online)  # pyright: ignore[reportPrivateImportUsage]

    def _forward(self, batch: Batch) -> tuple[QOutputs, QOutputs, QOutputs, Tensor, Tensor]:
        """Return the outputs for states and next states, the bonuses of the next states, and the bonus's loss."""
        x, y = batch.states, batch.next_states
        no_grad, zero = torch.no_grad(), torch.zeros((), device=self.device)
        functions: list[Callable[[], Any]] = [
            lambda: self._q_outputs(self.online, x),
            lambda: no_grad(self._q_outputs)(self.online, y),
            lambda: no_grad(self._q_outputs)(self.target, y),
        ]
        if self.bonus is not None:
            inputs = select(_state_actions(x, self.actions), batch.actions) if self.agent.optimistic else y
            functions.append(lambda: self._bonus_outputs(self.bonus, inputs, self._uniforms[:, 1:]))
        with self._autocast():
            online, next_online, next_target, *bonus = side_by_side(functions, self.device)
        values, loss = bonus[0] if bonus else (zero[None], zero)
        return online, next_online, next_target, values, loss

    def _action_bonus(self, x: Tensor) -> Float[Tensor, "n actions"]:
        """Return the weighted bonus of each action (optimistic agents)."""
        bonus = self.bonus.value(_state_actions(x, self.actions).flatten(0, 1)).view(len(x), self.actions)
        return self.agent.bonus_weight.at(self.frames) * bonus

    def _step_networks(self) -> Tensor:
        """Clip the gradient, step, and return the gradient's norm."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.learning.max_grad_norm, foreach=True)
        self.optimisers[0].step()
        return norm

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda", cache_enabled=False)


def _q_outputs(network: QNetwork, x: Tensor) -> QOutputs:
    return network(_as_float(x))


def _bonus_outputs(networks: BonusNetworks, x: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    return networks.value_and_loss(_as_float(x), uniforms)


def _as_float(x: Tensor) -> Tensor:
    """Return bytes as numbers between 0 and 1."""
    return x.float() / 255 if x.dtype == torch.uint8 else x


def _state_actions(x: Float[Tensor, "n d"], actions: int) -> Float[Tensor, "n actions pair"]:
    """Return every state with every action: the state in the columns of the action, zeros in the others."""
    return torch.einsum("nd,ab->nabd", _as_float(x), torch.eye(actions, device=x.device)).flatten(2)
