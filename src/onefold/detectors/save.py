"""Content of a detector's file: tensors, and a header in JSON."""

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from onefold.core.batches import map_batch, named
from onefold.core.schema import to_json
from onefold.core.storage import with_prefix
from onefold.detectors.state import DetectorState
from onefold.inputs.reader import Reader
from onefold.inputs.text import pack_texts, unpack_texts
from onefold.nn.cudnn import exact_float32
from onefold.types import Batch, Kernel

if TYPE_CHECKING:
    from onefold.detectors.base import Detector

KIND = "detector"
LAYOUT = 3  # of headers and tensor names
TEXTS = ("reservoir.samples.x", "held_out.samples.x", "probe.x")  # tensors of samples, which may be texts
PARTS = ("bytes", "lengths")
PROBES = 4  # samples whose similarity identifies a kernel


def contents(detector: "Detector", *, samples: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the header of a detector's file, except for the probe of its kernel.

    Args:
        detector: Fitted detector.
        samples: Include the raw samples of the reservoirs.
    """
    state = detector.state
    tensors = with_prefix("scorer", state.scorer.state_dict())
    header: dict[str, Any] = {
        "layout": LAYOUT,
        "method": type(detector).__name__,
        "spec": to_json(state.spec),
        "summary": to_json(state.summary),
        "reader": state.reader.to_json(),
        "alarm": None,
        "reservoirs": None,
        "kernel": None if detector.kernel is None else getattr(detector.kernel, "settings", {}),
    }
    if detector.alarm is not None:
        header["alarm"] = {"fpr": detector.alarm.fpr}
        tensors["alarm"] = torch.from_numpy(detector.alarm.scores)
    elif detector.group_alarms is not None:
        alarms = detector.group_alarms
        rates = [alarm.fpr for alarm in alarms.values()]
        header["alarm"] = {"fpr": rates[0], "groups": {name: len(alarm.scores) for name, alarm in alarms.items()}}
        tensors["alarm"] = torch.from_numpy(np.concatenate([alarm.scores for alarm in alarms.values()]))
    if samples:
        header["reservoirs"] = {name: reservoir.to_json() for name, reservoir in state.reservoirs.items()}
        for name, reservoir in state.reservoirs.items():
            tensors |= reservoir.tensors(name)
    return packed(tensors, state.reader), header


def packed(tensors: dict[str, Tensor], reader: Reader) -> dict[str, Tensor]:
    """Return the tensors of a file with samples that are texts one after another, without padding."""
    if reader.kind != "text":
        return tensors
    texts = {name: pack_texts(tensors[name]) for name in TEXTS if name in tensors}
    others = {name: tensor for name, tensor in tensors.items() if name not in texts}
    parts = {f"{name}.{part}": value for name, pack in texts.items() for part, value in zip(PARTS, pack, strict=True)}
    return others | parts


def unpacked(tensors: dict[str, Tensor], reader: Reader) -> dict[str, Tensor]:
    """Return the tensors that `packed` changed; raise ValueError if the texts are damaged."""
    if reader.kind != "text":
        return tensors
    names = {name: [f"{name}.{part}" for part in PARTS] for name in TEXTS if f"{name}.{PARTS[0]}" in tensors}
    texts = {name: unpack_texts(*(tensors[part] for part in parts)) for name, parts in names.items()}
    used = {part for parts in names.values() for part in parts}
    return {name: tensor for name, tensor in tensors.items() if name not in used} | texts


def probe(state: DetectorState, kernel: Kernel, *, samples: bool) -> dict[str, Tensor]:
    """Return a few samples and their similarities, by which `load` recognises the kernel.

    Without samples in the file the probe consists of random numbers. A model that cannot process them is not checked.
    """
    if samples and state.reservoir.samples is not None:
        batch = map_batch(lambda t: t[:PROBES], state.reservoir.samples)
        similarities = similarity(state, kernel, batch)
    else:
        batch, similarities = state.reader.random(PROBES), torch.tensor(torch.nan)
        with contextlib.suppress(Exception):  # a user's model may fail in any way on random numbers
            similarities = similarities if batch is None else similarity(state, kernel, batch)
        if batch is None or not similarities.isfinite().all():
            return {}
    return packed({"similarity": similarities, **with_prefix("probe", named(batch))}, state.reader)


def similarity(state: DetectorState, kernel: Kernel, raw: Batch) -> Tensor:
    """Return the scorer's products of all pairs of raw samples, by default the kernel matrix, in float64 on the CPU."""
    batch = state.prepare(map_batch(lambda t: t.to(state.device), raw))
    scorer: Any = state.scorer
    with exact_float32(), torch.no_grad():  # the same numbers on every device
        products = scorer.similarity(batch) if hasattr(scorer, "similarity") else None
        return (kernel(batch, batch) if products is None else products).detach().double().cpu()
