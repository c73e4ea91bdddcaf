"""PPO in one file, in the style of CleanRL. The exploration bonus is in the lines marked with "bonus"."""

import gymnasium
import torch
from torch import nn
from torch.distributions import Categorical

from onefold.rl import CSDBonus
from onefold.rl.small_envs import DeceptiveChain

TOTAL_STEPS, ENVS, STEPS, GAMMA, LAMBDA, CLIP, BETA = 40_000, 8, 128, 0.99, 0.95, 0.2, 1.0
torch.manual_seed(0)
envs = gymnasium.vector.SyncVectorEnv([lambda: DeceptiveChain(40)] * ENVS)
inputs, actions_count = envs.single_observation_space.shape[0], envs.single_action_space.n
actor = nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, actions_count))
critic = nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=3e-4)
bonus = CSDBonus()  # bonus
obs, done = torch.tensor(envs.reset(seed=0)[0]), torch.zeros(ENVS)
for iteration in range(TOTAL_STEPS // (ENVS * STEPS)):
    rows = []
    for _ in range(STEPS):
        with torch.no_grad():
            policy, value = Categorical(logits=actor(obs)), critic(obs).squeeze(1)
        action = policy.sample()
        next_obs, reward, terminated, truncated, _ = envs.step(action.numpy())
        next_obs, reward = torch.tensor(next_obs), torch.tensor(reward, dtype=torch.float32)
        extra = BETA * bonus(next_obs)  # bonus
        ends, valid = torch.tensor(terminated | truncated).float(), 1 - done  # after an end, a step only resets
        rows.append((obs, action, policy.log_prob(action), value, reward + extra, ends, valid, reward))
        obs, done = next_obs, ends
    b_obs, b_action, b_logp, values, rewards, ends, valid, extrinsic = map(torch.stack, zip(*rows, strict=True))
    bonus.update(torch.cat([b_obs[1:].flatten(0, 1), obs]))  # bonus
    advantages, last, next_value = torch.zeros_like(rewards), 0, critic(obs).squeeze(1).detach()
    for t in reversed(range(STEPS)):
        delta = rewards[t] + GAMMA * (1 - ends[t]) * next_value - values[t]
        advantages[t] = last = delta + GAMMA * LAMBDA * (1 - ends[t]) * last
        next_value = values[t]
    kept, returns = valid.bool().flatten(), (advantages + values).flatten()
    data = [part.flatten(0, 1)[kept] for part in (b_obs, b_action, b_logp, advantages)] + [returns[kept]]
    for rows in [part for _ in range(10) for part in torch.randperm(len(data[0])).split(64)]:
        o, a, logp, advantage, target = (part[rows] for part in data)
        policy, advantage = Categorical(logits=actor(o)), (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = (policy.log_prob(a) - logp).exp()
        gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
        loss = 0.5 * (critic(o).squeeze(1) - target).square().mean() - gain
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], 0.5)
        optimizer.step()
    print(f"iteration {iteration}: reward per step {extrinsic[valid.bool()].mean():.4f}, bonus {extra.mean():.3f}")
