"""Merging of detectors that were fitted on parts of the data."""

import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onefold.core.batches import named
from onefold.detectors.build import Spec
from onefold.detectors.save import probe, similarity
from onefold.detectors.state import DetectorState
from onefold.errors import InputError
from onefold.inputs.reader import Prepare, Reader
from onefold.inputs.reservoir import Reservoir
from onefold.nn.nets import finished
from onefold.types import ArrayLike, Batch

if TYPE_CHECKING:
    from onefold.detectors.base import Detector

FIT_LIKE = "Fit one with like= the other"


def like_state(detector: "Detector", like: "Detector", spec: Spec, x: ArrayLike) -> tuple[DetectorState, int]:
    """Return a state with the layout and the features of `like` and no samples, and a salt for reservoirs of `x`.

    Without the salt, reservoirs of one seed would keep the same rows of every part of the data.
    """
    check_same_features(detector, like, like.state)
    reader, salt = like.state.reader, 1
    for tensor in named(next(iter(reader.batches(x)))).values():
        salt = zlib.crc32(tensor.contiguous().numpy().tobytes(), salt) or 1
    scorer = detector.build(spec)
    _features(scorer).load_state_dict(_features(like.state.scorer).state_dict())
    finished(scorer, detector.device)
    state = DetectorState(
        reader=reader,
        prepare=Prepare(reader).to(detector.device),
        scorer=scorer,
        spec=spec,
        device=detector.device,
        reservoir=Reservoir(like.state.reservoir.capacity, detector.seed, salt),
    )
    return state, salt


def merge_states(detector: "Detector", other: "Detector") -> DetectorState:
    """Return the state of `detector` with the samples and the range of both; the scorer is the one of `detector`.

    Raises:
        InputError: The detectors differ in more than the data that they were fitted on.
    """
    state, added = detector.state, other.state
    check_same_features(other, detector, added)
    layout = replace(added.reader, low=state.reader.low, high=state.reader.high)
    if layout != state.reader:
        raise InputError("fitted on data of another layout", argument="other", hint=f"{FIT_LIKE}.")
    features, others = _features(state.scorer).state_dict(), _features(added.scorer).state_dict()
    if features.keys() != others.keys() or not all(
        torch.equal(tensor.cpu(), others[name].cpu()) for name, tensor in features.items()
    ):
        raise InputError("fitted with another standardisation or random network", argument="other", hint=f"{FIT_LIKE}.")
    return replace(
        state,
        reader=_joint_range(state.reader, added.reader),
        reservoir=state.reservoir.merge(added.reservoir),
        held_out=state.held_out.merge(added.held_out),
    )


def check_same_features(detector: "Detector", like: "Detector", state: DetectorState) -> None:
    """Raise InputError if two detectors differ in method, settings or kernel; `state` is one of their states."""
    if type(detector) is not type(like):
        raise InputError(f"a {type(like).__name__} and a {type(detector).__name__} cannot be merged. Use one method.")
    differing = [name for name, value in detector.settings.items() if like.settings[name] != value]
    if differing:
        raise InputError(f"the detectors differ in {', '.join(differing)}. Use the same settings to merge them.")
    if (detector.kernel is None) != (like.kernel is None) or not _same_kernel(detector, like, state):
        raise InputError("the detectors have different kernels. Use the same model, layer and width to merge them.")


def _same_kernel(detector: "Detector", like: "Detector", state: DetectorState) -> bool:
    """Return True if two kernels agree on a few samples."""
    if detector.kernel is like.kernel or detector.kernel is None or like.kernel is None:
        return True
    tensors = probe(state, detector.kernel, samples=True)
    expected = tensors.pop("similarity", None)
    if expected is None:
        return True  # no samples to compare them on
    samples = {name.removeprefix("probe."): tensor for name, tensor in tensors.items()}
    batch: Batch = samples["x"] if set(samples) == {"x"} else samples
    actual = similarity(state, like.kernel, batch)
    return actual.shape == expected.shape and torch.allclose(actual, expected, rtol=1e-3, atol=1e-6)


def _features(scorer: Any) -> nn.Module:
    return scorer.map


def _joint_range(reader: Reader, other: Reader) -> Reader:
    return replace(reader, low=min(reader.low, other.low), high=max(reader.high, other.high))
