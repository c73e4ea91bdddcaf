"""What a value should have been: targets, errors and ways to choose, as pure functions."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

IDS_FLOOR = 1e-5  # ε₁ and ε₂ of Nikolov et al. (2019)


class Support(NamedTuple):
    """The returns that a distribution is over: `atoms` of them from `low` to `high`."""

    low: float
    high: float
    atoms: int

    def values(self, like: Tensor) -> Float[Tensor, " atoms"]:
        return torch.linspace(self.low, self.high, self.atoms, device=like.device, dtype=torch.float32)

    def first(self) -> Float[Tensor, " atoms"]:
        """Logits to begin with: returns are near zero, and anything is possible.

        A uniform distribution gets narrower by γⁿ with every copy to the target, so that for a hundred copies its width
        would drown what actions differ in.
        """
        values, width = torch.linspace(self.low, self.high, self.atoms), (self.high - self.low) / 40
        near = torch.softmax(-0.5 * (values / width).square(), 0)
        return (0.99 * near + 0.01 / self.atoms).log()


def picked(values: Float[Tensor, "... n actions atoms"], actions: Int[Tensor, "... n"]) -> Float[Tensor, "... n atoms"]:
    """The values of these actions."""
    where = actions[..., None, None].expand(*actions.shape, 1, values.shape[-1])
    return values.gather(-2, where).squeeze(-2)


def expected(logits: Float[Tensor, "... atoms"], support: Support) -> Float[Tensor, "..."]:
    """The mean of a distribution over the support."""
    return (logits.float().softmax(-1) * support.values(logits)).sum(-1)


def spread(logits: Float[Tensor, "... atoms"], support: Support) -> Float[Tensor, "..."]:
    """The variance of a distribution over the support."""
    chances, values = logits.float().softmax(-1), support.values(logits)
    mean = (chances * values).sum(-1, keepdim=True)
    return (chances * (values - mean).square()).sum(-1)


def projected(
    chances: Float[Tensor, "n atoms"],
    rewards: Float[Tensor, " n"],
    discounts: Float[Tensor, " n"],
    support: Support,
) -> tuple[Float[Tensor, "n atoms"], Float[Tensor, ""]]:
    """The distribution of r + γz, z over the support, brought back onto it (Bellemare et al., 2017), and the mass that
    lay outside.

    Each moved atom's mass goes to its two neighbours in proportion to how near they are: atom i receives
    Σ_j p_j · max(0, 1 − |clip(r + γ z_j) − z_i| / Δz), as a matrix, without scattering.
    """
    values = support.values(chances)
    step = (support.high - support.low) / (support.atoms - 1)
    moved = rewards[:, None] + discounts[:, None] * values
    inside = moved.clamp(support.low, support.high)
    shares = (1 - (inside[:, None, :] - values[None, :, None]).abs() / step).clamp(min=0)
    outside = (chances * ((moved - inside).abs() > 1e-3 * step)).sum(1).mean()
    return torch.einsum("nij,nj->ni", shares, chances), outside


def divergence(
    logits: Float[Tensor, "n atoms"], target: Float[Tensor, "n atoms"]
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Cross-entropy, to learn by, and the Kullback–Leibler divergence, which is zero for a perfect prediction."""
    cross = -(target * F.log_softmax(logits.float(), -1)).sum(-1)
    return cross, (cross.detach() + torch.special.xlogy(target, target).sum(-1)).clamp(min=0)


def regret_over_information(
    means: Float[Tensor, "n actions"],
    deviations: Float[Tensor, "n actions"],
    variances: Float[Tensor, "n actions"],
    confidence: float | Tensor,
) -> Float[Tensor, "n actions"]:
    """Δ(a)² / I(a) of information-directed sampling (Nikolov et al., 2019): the smaller, the better.

    Δ(a) = max_b (μ(b) + λσ(b)) − (μ(a) − λσ(a)) is the most that a may cost, and I(a) = log(1 + σ(a)²/ρ(a)²) + ε₂
    what it tells; μ and σ are the members', ρ² the return's variance over its mean over actions.
    """
    highest = (means + confidence * deviations).amax(1, keepdim=True)
    regret = highest - (means - confidence * deviations)
    noise = variances / (variances.mean(1, keepdim=True) + IDS_FLOOR)
    information = torch.log1p(deviations.square() / noise.clamp(min=IDS_FLOOR)) + IDS_FLOOR
    return regret.square() / information
