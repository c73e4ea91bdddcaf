"""PPO of torchrl with an exploration bonus, which is added to the rewards of every collected batch."""

import torch
from tensordict.nn import ProbabilisticTensorDictModule as Sampler
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import GymWrapper
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from onefold.rl import CSDBonus
from onefold.rl.small_envs import DeceptiveChain

TOTAL_STEPS, BATCH, BETA = 40_000, 1024, 1.0
torch.manual_seed(0)
env = GymWrapper(DeceptiveChain(40), categorical_action_encoding=True)
inputs, actions = env.observation_spec["observation"].shape[-1], env.action_spec.n


def network(outputs):
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


actor = ProbabilisticTensorDictSequential(
    TensorDictModule(network(actions), ["observation"], ["logits"]),
    Sampler(
        ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True, default_interaction_type="random"
    ),
)
critic = TensorDictModule(network(1), ["observation"], ["state_value"])
gae, loss = GAE(gamma=0.99, lmbda=0.95, value_network=critic), ClipPPOLoss(actor, critic, entropy_coeff=0.0)
memory = TensorDictReplayBuffer(storage=LazyTensorStorage(BATCH), sampler=SamplerWithoutReplacement(), batch_size=64)
optimizer, bonus = torch.optim.Adam(loss.parameters(), lr=3e-4), CSDBonus()
for data in Collector(env, actor, frames_per_batch=BATCH, total_frames=TOTAL_STEPS):
    extrinsic, after = data["next", "reward"].mean(), data["next", "observation"]
    data["next", "reward"] += BETA * bonus(after)[:, None]
    bonus.update(after)
    for _ in range(10):
        gae(data)
        memory.extend(data.reshape(-1))
        for batch in memory:
            losses = loss(batch)
            optimizer.zero_grad()
            sum(losses[name] for name in ("loss_objective", "loss_critic")).backward()
            nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
            optimizer.step()
    print(f"reward per step {extrinsic:.4f}")
