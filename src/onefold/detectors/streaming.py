"""Updates by gradient steps: minibatches of new and stored samples, and their number."""

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
PASSES = 5  # over the new samples


def all_samples(stored: Reservoir, new: Reservoir, prepare: nn.Module, device: torch.device) -> InMemorySamples:
    """Return stored samples, then new ones."""
    if stored.samples is None or new.samples is None:
        raise InputError("this detector was saved without samples: it cannot be updated. Save it with samples=True.")
    return InMemorySamples(map_batch(lambda t: t.to(device), concatenate([stored.samples, new.samples])), prepare)


def balanced_samples(stored: Reservoir, new: Reservoir, prepare: nn.Module, device: torch.device) -> SampleSubset:
    """Return stored samples, then as many draws from the new ones, so that half of every minibatch is new."""
    samples = all_samples(stored, new, prepare, device)
    rows = torch.arange(len(stored), device=device)
    return SampleSubset(samples, torch.cat([rows, len(rows) + rows % len(new)]))


def update_recipe(recipe: Recipe, count: int) -> Recipe:
    """Return the recipe of an update on `count` new samples: steps in proportion to them, half the learning rate."""
    steps = min(recipe.steps, max(MIN_STEPS, math.ceil(2 * PASSES * count / recipe.batch)))
    return replace(recipe, steps=steps, lr=recipe.lr / 2, warmup=min(recipe.warmup, steps // 10))
