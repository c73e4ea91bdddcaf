"""Wrong arguments: one line that names the argument, whatever its type."""

import json
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from test_methods import vectors

import onefold
from onefold import kernels
from onefold.core import arguments
from onefold.errors import InputError


@pytest.mark.parametrize("value", [2, np.int64(2), np.uint8(2), torch.tensor(2)])
def test_integers_of_any_library(value: Any) -> None:
    number = arguments.check_integer(value, "k", 1, 3)
    assert number == 2
    assert type(number) is int


@pytest.mark.parametrize("value", [0, 4, 2.0, 2.5, "2", True, None, float("nan"), [2], 10**1000])
def test_what_is_no_integer_within_bounds(value: Any) -> None:
    with pytest.raises(InputError, match="k: must be an integer from 1 to 3") as error:
        arguments.check_integer(value, "k", 1, 3)
    assert len(str(error.value)) < 120


@pytest.mark.parametrize(
    ("value", "closed", "good"),
    [
        (0.5, "neither", True), (np.float32(0.5), "neither", True), (0, "neither", False), (1, "neither", False),
        (0, "left", True), (1, "left", False), (0, "both", True), (1, "both", True), ("0.5", "both", False),
        (True, "both", False), (float("nan"), "both", False), (None, "both", False), (2, "both", False),
    ],
)  # fmt: skip
def test_numbers_and_their_bounds(value: Any, closed: Any, good: bool) -> None:
    if good:
        assert arguments.check_number(value, "rate", 0, 1, closed) == float(value)
    else:
        with pytest.raises(InputError, match="rate: must be a number in"):
            arguments.check_number(value, "rate", 0, 1, closed)


def test_infinity_is_no_number() -> None:
    with pytest.raises(InputError, match="half_life: must be a positive number, not inf"):
        arguments.check_number(float("inf"), "half_life")
    with pytest.raises(InputError, match="positive number"):
        arguments.check_number(10**1000, "half_life")


CALLS = {
    "KNN(k=2.5)": "k: must be an integer from 1 to 50,000, not 2.5",
    "KNN(k='3')": "k: must be an integer from 1 to 50,000, not '3'",
    "KNN(k=6, bank=5)": "k: must be an integer from 1 to 5, not 6",
    "KNN(bank=0)": "bank: must be an integer of at least 1, not 0",
    "LastLayerGP(noise=-1)": "noise: must be a positive number, not -1",
    "LastLayerGP(width=True)": "width: must be an integer from 1 to 131,072, not True",
    "LastLayerGP(score='entropy')": "score: must be one of combined, variance, relative, not 'entropy'",
    "CSD(score='entropy')": "score: must be one of surprisal, combined, variance, relative, not 'entropy'",
    "CSD(augment=2)": "augment: must be a number in [0, 1], not 2",
    "CSD(recipe=1000)": "recipe: must be a Recipe, not 1000",
    "CSD(architecture={1: 2})": "architecture: must be an Architecture, not a dict",
    "CSD(seed=-1)": "seed: must be an integer from 0 to 4,294,967,295, not -1",
    "CSD(device=3)": "device: 3 is unknown. Use 'auto', 'cpu', 'cuda' or 'cuda:1'.",
    "DeepEnsemble(hidden=3)": "hidden: must be at most 64 layer sizes, as (256, 256), not 3",
    "DeepEnsemble(score='relative')": "score: must be one of mutual_information, entropy, variance, not 'relative'",
    "DeepEnsemble(members=1)": "members: must be an integer of at least 2, not 1",
    "RND(hidden=(0,))": "hidden[0]: must be an integer from 1 to 1,048,576, not 0",
    "RND(width=-1)": "width: must be an integer from 1 to 1,048,576, not -1",
    "MCDropout(channels='ab')": "channels: must be at most 64 layer sizes, as (256, 256), not 'ab'",
    "MCDropout(augment='blurs')": "augment: must be one of none, crops, flips, not 'blurs'",
    "MCDropout(rate=1.5)": "rate: must be a number in (0, 1), not 1.5",
    "Laplace(samples=10**6)": "samples: must be an integer from 2 to 1,000, not 1000000",
    "Laplace(prior_precision=float('nan'))": "prior_precision: must be a positive number, not nan",
    "Laplace(score='anger')": "score: must be one of mutual_information, entropy, variance, not 'anger'",
    "SGMCMC(momentum=1)": "momentum: must be a number in [0, 1), not 1",
    "Energy(nn.Linear(2, 2), temperature=0)": "temperature: must be a positive number, not 0",
    "Energy(object())": "the model is not a PyTorch model (object). Pass a torch.nn.Module or a torch.export program.",
    "distil.Architecture(pairs='some')": "pairs: must be one of all, random, not 'some'",
    "distil.Architecture(hidden=(2**21,))": (
        "hidden[0]: must be an integer from 1 to 1,048,576, not 2097152"
    ),
    "Recipe(steps='3')": "steps: must be an integer of at least 1, not '3'",
    "Recipe(steps=10, warmup=10)": "warmup: must be an integer from 0 to 9, not 10",
    "load('a\\0b')": "path: must be the name of a file, not 'a\\x00b'",
    "load(3)": "path: must be text or a path, not 3",
    "CSD(nn.Linear(2, 2))": (
        "kernel: a model is not a kernel. Pass kernels.from_model(model), the kernel of its features."
    ),
    "LastLayerGP(kernels.infinite())": (
        "kernel: InfiniteMLP is not supported here. Pass a kernel with a call k(x1, x2) and .features, .diag."
    ),
    "CSD(object())": "kernel: object is not supported here. Pass a kernel with a call k(x1, x2) and .diag.",
    "kernels.from_model(nn.Linear(2, 2)).diag([1, 2])": (
        "batch: a list is not supported here. Pass a tensor, a tuple of tensors or a dict of tensors, samples first."
    ),
    "kernels.infinite(1, activation='gelu')": "no closed form for 1 hidden layers of 'gelu', ntk",
    "kernels.from_model(pipeline)": (
        "the model is not a PyTorch model (Pipeline). Fit the detector on what its transform() returns, or use "
        "onefold.sklearn.OnefoldDetector."
    ),
    "kernels.from_model(kernels.from_model(nn.Linear(4, 2)))": (
        "the model is a kernel already (ModelFeatures). Pass it to the detector as it is."
    ),
    "csd.update(x, half_life=-1)": "half_life: must be a positive number, not -1",
    "gp.update(x, half_life=float('inf'))": "half_life: must be a positive number, not inf",
    "gp.neighbours(x, -1)": "k: must be an integer of at least 1, not -1",
    "gp.neighbours(x, 1.5)": "k: must be an integer of at least 1, not 1.5",
    "gp.calibrate(x, '0.1')": "fpr: must be a number in (0, 1), not '0.1'",
    "gp.is_ood(x, fdr=1)": "fdr: must be a number in (0, 1), not 1",
    "gp.save('a\\0b')": "path: must be the name of a file, not 'a\\x00b'",
    "gp.export(3)": "path: must be text or a path, not 3",
    "RND(recipe=Recipe(steps=2)).fit(x, checkpoint=3)": "checkpoint: must be text or a path, not 3",
}  # fmt: skip

SCRIPT = """
import json, sys
from onefold import *
from onefold import distil, kernels
from onefold.nn.train import Recipe
from sklearn.pipeline import Pipeline
from torch import nn, randn
pipeline, x = Pipeline([("scale", "passthrough")]), randn(40, 4)
gp = LastLayerGP(width=16).fit(x).calibrate(x, fpr=0.1)
csd = CSD(recipe=Recipe(steps=2, batch=8)).fit(x)
messages = {}
for call in json.load(sys.stdin):
    try:
        eval(call)
    except OnefoldError as error:
        messages[call] = str(error)
print(json.dumps(messages))
"""


@pytest.fixture(scope="module")
def messages() -> dict[str, str]:
    """Return the message of every call, from one process without the type checker of the tests."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        input=json.dumps(list(CALLS)),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("call", CALLS)
def test_wrong_arguments_are_named(call: str, messages: dict[str, str]) -> None:
    assert messages[call] == CALLS[call]


def test_width_belongs_to_the_built_in_network() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    with pytest.raises(InputError, match=r"from_model\(model, width="):
        onefold.LastLayerGP(kernels.from_model(net), width=64)
    assert onefold.LastLayerGP(kernels.from_model(net)).fit(vectors(60, 4)).relative(vectors(3, 4)).shape == (3,)


def test_a_detector_on_a_model_is_not_pickled() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    detector = onefold.KNN(kernel=kernels.from_model(net)).fit(vectors(60, 4))
    with pytest.raises(InputError, match="save"):
        pickle.dumps(detector)


def test_a_reader_that_closes_its_pipe_ends_the_command_quietly() -> None:
    script = "import sys; from onefold.cli import main; sys.exit(main(['--help']))"
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()  # before anything is written
    process.stdout = None
    errors = process.communicate()[1]
    assert (process.returncode, errors) == (141, "")
