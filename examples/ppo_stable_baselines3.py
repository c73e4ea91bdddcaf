"""PPO of stable-baselines3 with an exploration bonus, by a callback."""

from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

from onefold.rl import CSDBonus
from onefold.rl.sb3 import IntrinsicCallback
from onefold.rl.small_envs import DeceptiveChain

TOTAL_STEPS, BETA = 40_000, 1.0
envs = make_vec_env(lambda: DeceptiveChain(40), n_envs=8, seed=0)
model = PPO("MlpPolicy", envs, n_steps=128, device="cpu", seed=0)
model.learn(TOTAL_STEPS, callback=IntrinsicCallback(CSDBonus(), beta=BETA))
returns = [episode["r"] for episode in model.ep_info_buffer]
print(f"return of the last episodes: {sum(returns) / len(returns):.2f}")
