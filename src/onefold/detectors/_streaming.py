"""What updates by gradient steps share: half of every minibatch is new, half is what is remembered of the rest."""

import math
from dataclasses import replace

import torch
from torch import nn

from onefold.core.batches import concatenate, map_batch
from onefold.errors import InputError
from onefold.inputs.reservoir import Reservoir
from onefold.inputs.samples import InMemorySamples, SampleSubset
from onefold.nn.train import Recipe

MIN_STEPS = 50
PASSES = 5  # how many times a new sample is seen


def both_halves(remembered: Reservoir, fresh: Reservoir, prepare: nn.Module, device: torch.device) -> SampleSubset:
    """Samples to draw minibatches from, as many draws from the new as from the remembered."""
    if remembered.samples is None or fresh.samples is None:
        raise InputError("this detector was saved without samples: it cannot be updated")
    raw = map_batch(lambda t: t.to(device), concatenate([remembered.samples, fresh.samples]))
    old = torch.arange(len(remembered), device=device)
    return SampleSubset(InMemorySamples(raw, prepare), torch.cat([old, len(old) + old % len(fresh)]))


def update_recipe(recipe: Recipe, count: int) -> Recipe:
    """Steps in proportion to the new data, at most those of the fit, at half its rate."""
    steps = min(recipe.steps, max(MIN_STEPS, math.ceil(2 * PASSES * count / recipe.batch)))
    return replace(recipe, steps=steps, lr=recipe.lr / 2, warmup=min(recipe.warmup, steps // 10))
