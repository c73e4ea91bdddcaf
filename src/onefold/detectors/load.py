"""Loading of detectors from files, which may be damaged or come from an attacker."""

from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from onefold.core import storage
from onefold.core.arguments import check_path
from onefold.core.batches import map_batch, named, pick_device
from onefold.core.schema import from_json
from onefold.core.storage import under_prefix
from onefold.detectors.alarm import Alarm, AnyAlarm, GroupAlarms
from onefold.detectors.base import Detector
from onefold.detectors.build import Spec
from onefold.detectors.registry import METHODS
from onefold.detectors.save import KIND, LAYOUT, contents, similarity, unpacked
from onefold.detectors.state import DetectorState, to_scores
from onefold.errors import FileError, InputError, LayerError, NotEnoughMemoryError
from onefold.inputs.reader import DTYPES, Prepare, Reader
from onefold.inputs.reservoir import Reservoir
from onefold.inputs.samples import HELD_OUT, RESERVOIR_SIZE
from onefold.kernels import ModelFeatures, from_model
from onefold.kernels.model import ModelSettings, kernel_of, parse_settings
from onefold.kernels.pretrained import restore_pretrained
from onefold.nn.nets import finished
from onefold.nn.programs import is_program
from onefold.types import Batch, Kernel, Model

CAPACITIES = {"reservoir": RESERVOIR_SIZE, "held_out": HELD_OUT}
POSITIVE = ("std", "scale", "count", "bandwidth")  # names of weights that are divisors
LARGEST_TRIAL = 2**18  # numbers in a sample that is scored once to check the file
OTHER_KERNEL = "the kernel is not the one that this detector was fitted with (another model, layer or width)"


def load(path: str | Path, *, model: Model | Kernel | None = None, device: str = "auto") -> Detector:
    """Load a detector that `save` wrote, with its calibration and its stored samples.

    Args:
        path: File of the detector.
        model: Model of the fit, or its kernel, for a detector that was fitted with kernels.from_model(model) or with
            another kernel. The file does not contain it.
        device: "auto", "cpu", "cuda" or "cuda:1".

    Returns:
        The detector.

    Raises:
        FileError: The file is damaged, not a detector, written by another version, or fitted on another model.
        InputError: `model` is missing, or was not expected.
        NotEnoughMemoryError: The detector does not fit into memory.
    """
    path = check_path(path)
    chosen = pick_device(device)
    tensors, header = storage.load(path, KIND)
    _check_layout(header.get("layout", 1), path)
    method = _method(header.get("method"), path)
    kernel = _kernel(header.get("kernel"), model, path)
    _check_takes_kernel(method, kernel, path)
    try:
        detector, state = _restore(method, tensors, header, kernel, str(chosen))
        if (sample := _sample(state, tensors, kernel)) is not None:
            with torch.no_grad():
                to_scores(state.scorer(next(state.prepared(sample))))
    except FileError as error:
        raise FileError(f"{path}: {error}") from None
    except (MemoryError, torch.OutOfMemoryError):
        raise NotEnoughMemoryError(f"{path}: does not fit into the memory of {chosen}") from None
    except Exception as error:  # a forged file can fail in any way
        raise FileError(f"{path}: damaged, or made by another version ({type(error).__name__})") from None
    return detector


def _check_layout(layout: Any, path: Path) -> None:
    """Raise FileError for a file with another layout of headers and tensors."""
    if type(layout) is not int or not 0 < layout < 10**6:
        raise FileError(f"{path}: damaged, or not a file of onefold")
    if layout < LAYOUT:
        raise FileError(
            f"{path}: an older onefold wrote it (layout {layout}; this version reads {LAYOUT}). Fit the detector again."
        )
    if layout > LAYOUT:
        raise FileError(
            f"{path}: a newer onefold wrote it (layout {layout}; this version reads {LAYOUT}). "
            "Upgrade with pip install --upgrade onefold."
        )


def _method(name: Any, path: Path) -> type[Detector]:
    """Return the class of the method with this name."""
    method = METHODS.get(name) if isinstance(name, str) else None
    if method is None:
        raise FileError(
            f"{path}: made by the method {str(name)[:40]!r}; this version of onefold has {', '.join(METHODS)}"
        )
    return method.detector_class


def _kernel(settings: Any, model: Model | Kernel | None, path: Path) -> Kernel | None:
    """Return the kernel of the fit, made from the user's model and the settings in the file."""
    if settings is None:
        if model is not None:
            raise InputError(f"{path} was not fitted on a model", argument="model", hint="Load it without one.")
        return None
    try:
        parsed = parse_settings(settings) if settings != {} else None  # {} for a kernel that is not of a model
    except InputError:
        raise FileError(f"{path}: damaged, its kernel has settings that no kernel has") from None
    if model is None and parsed is not None and parsed.pretrained is not None:
        return _restore_pretrained(parsed, path)
    if model is None:
        raise InputError(
            f"{path} was fitted on a model or kernel that is not in the file", argument="model", hint="Pass it as well."
        )
    if not (isinstance(model, nn.Module) or is_program(model)):
        if not isinstance(model, Kernel):
            raise InputError(
                f"a {type(model).__name__} is not supported", argument="model", hint="Pass the model of the fit."
            )
        return model
    try:
        return from_model(model) if parsed is None else kernel_of(model, parsed)
    except (InputError, LayerError) as error:
        raise FileError(f"{path}: was fitted on another model: {error.problem}") from None


def _restore_pretrained(settings: ModelSettings, path: Path) -> Kernel:
    """Return the kernel of a pretrained encoder, read from where the fit read it."""
    try:
        return restore_pretrained(settings)
    except FileError as error:
        raise FileError(f"{path}: {error}") from None
    except InputError as error:
        raise InputError(
            f"{path} was fitted on a pretrained encoder that cannot be read: {error}",
            argument="model",
            hint="Pass kernels.from_pretrained(FOLDER) with its folder.",
        ) from None


def _check_takes_kernel(method: type[Detector], kernel: Kernel | None, path: Path) -> None:
    """Raise FileError if the method never has a kernel but the file does, or the reverse."""
    info = METHODS[method.__name__]
    if kernel is None and info.needs_classifier:
        raise FileError(f"{path}: damaged, there is no {method.__name__} without a model")
    if kernel is None:
        return
    if method.kernel_class is None:
        raise FileError(f"{path}: damaged, there is no {method.__name__} with a model")
    if not isinstance(kernel, method.kernel_class):
        raise FileError(f"{path}: {OTHER_KERNEL}")


def _restore(
    method: type[Detector], tensors: dict[str, Tensor], header: dict[str, Any], kernel: Kernel | None, device: str
) -> tuple[Detector, DetectorState]:
    """Return the detector of a file and its state; raise any error if the content is inconsistent."""
    spec = from_json(method.spec_class, header["spec"])
    detector = method.from_spec(spec, kernel, device)
    reader, weights = Reader.from_json(header["reader"]), under_prefix("scorer", tensors)
    stored, tensors = tensors, unpacked(tensors, reader)
    _check_spec(spec, reader, kernel, weights)
    scorer = _fill(detector.build(spec, meta=True), weights)
    finished(scorer, detector.device)
    state = DetectorState(
        reader=reader,
        prepare=Prepare(reader).to(detector.device),
        scorer=scorer,
        spec=spec,
        summary=from_json(method.summary_class, header["summary"]),
        device=detector.device,
        **_reservoirs(header["reservoirs"], tensors, reader),
    )
    detector.restore_state(state, None if header["alarm"] is None else _alarm(header["alarm"], tensors, detector))
    _check_complete(detector, stored, header)
    if kernel is not None:
        _check_kernel(state, kernel, tensors)
    return detector, state


def _alarm(content: dict[str, Any], tensors: dict[str, Tensor], detector: Detector) -> AnyAlarm:
    """Return the calibration of a file: one alarm, or one for each group."""
    scores = tensors["alarm"].numpy()
    if "groups" not in content:
        return Alarm(scores, content["fpr"], detector.seed, detector.resolution)
    alarms, start = {}, 0
    for name, count in content["groups"].items():
        part = scores[start : start + count] if count > 0 else scores[:0]
        alarms[name] = Alarm(part, content["fpr"], detector.seed, detector.resolution)
        start += count
    if start != len(scores) or not alarms:
        raise FileError("damaged, its groups are not those of its calibration scores")
    return GroupAlarms(alarms)


def _check_spec(spec: Spec, reader: Reader, kernel: Kernel | None, weights: dict[str, Tensor]) -> None:
    """Raise FileError if a spec does not fit the layout of the data, or needs more tensors than the file has."""
    if not isinstance(kernel, ModelFeatures) and spec.inputs not in ((), reader.sample_shape):
        raise _unlike_settings()
    if spec.least_tensors > len(weights):
        raise _unlike_settings()


def _unlike_settings() -> FileError:
    return FileError("damaged, its tensors are not those of its settings")


def _fill(scorer: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """Return the scorer with these weights; refuse other shapes, NaN, infinity, and divisors that are not positive."""
    if _forms(scorer.state_dict()) != _forms(weights):
        raise _unlike_settings()
    for name, tensor in weights.items():
        if not tensor.numel():
            raise _unlike_settings()
        low, high = tensor.aminmax()  # NaN if any value is; isfinite would need the memory for another copy
        if not (low.isfinite() and high.isfinite()) or (name.rpartition(".")[2] in POSITIVE and not low > 0):
            raise FileError(f"damaged, its weights {name} are not finite, or not positive")
    scorer.load_state_dict(weights, strict=True, assign=True)
    if not all(torch.equal(tensor, weights[name]) for name, tensor in scorer.state_dict().items()):
        raise FileError("damaged, weights that are shared have several values")
    return scorer


def _reservoirs(contents: Any, tensors: dict[str, Tensor], reader: Reader) -> dict[str, Reservoir]:
    """Return the reservoirs; with capacity 0 if the detector was saved without samples."""
    if contents is None:
        return {name: Reservoir(0, 0) for name in CAPACITIES}
    reservoirs = {name: Reservoir.restore(contents[name], tensors, name) for name in CAPACITIES}
    for name, reservoir in reservoirs.items():
        if reservoir.capacity > CAPACITIES[name]:
            raise FileError("damaged, it stores more samples than any detector")
        if reservoir.samples is not None:
            reservoir.replace_samples(_check_samples(reservoir.samples, reader))
    return reservoirs


def _probe(tensors: dict[str, Tensor], reader: Reader) -> Batch | None:
    """Return the samples by which a kernel is recognised, if the file has any."""
    samples = under_prefix("probe", tensors)
    return _check_samples(samples["x"] if set(samples) == {"x"} else samples, reader) if samples else None


def _check_samples(samples: Batch, reader: Reader) -> Batch:
    """Return samples if they have the keys, shapes and exact types of the training data."""
    tensors = named(samples)
    checked = reader.check(tensors if reader.kind == "named" else samples)  # restores the order of the keys
    if any(t.dtype != DTYPES[reader.dtypes[key]] for key, t in tensors.items()):
        raise FileError("damaged, its samples are not of the type of its data")
    if any(t.is_floating_point() and t.isinf().any() for t in tensors.values()):  # NaN is a missing value of a table
        raise FileError("damaged, its samples are infinite")
    return checked


def _check_complete(detector: Detector, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Raise FileError unless the detector would write exactly this file."""
    expected_tensors, expected = contents(detector, samples=header["reservoirs"] is not None)
    actual = {name: t for name, t in tensors.items() if name != "similarity" and not name.startswith("probe.")}
    expected["kernel"] = header["kernel"]  # the user may pass another kernel with the same values
    if _forms(actual) != _forms(expected_tensors) or not storage.same(storage.plain(expected), header):
        raise FileError("damaged, or made by another version: its parts do not belong together")
    if detector.kernel is None and len(actual) != len(tensors):
        raise FileError("damaged, it describes a kernel and has none")


def _check_kernel(state: DetectorState, kernel: Kernel, tensors: dict[str, Tensor]) -> None:
    """Raise FileError if the kernel does not give the similarities in the file."""
    probe = _probe(tensors, state.reader)
    if probe is None and "similarity" not in tensors and state.reservoir.samples is None:
        return
    if probe is None:
        raise FileError("damaged, it does not describe its kernel")
    try:
        actual = similarity(state, kernel, probe)
    except Exception:  # a user's model may fail in any way on samples of another
        _refuse_kernel()
    expected = tensors["similarity"]
    if _forms({"": actual}) != _forms({"": expected}) or not torch.allclose(actual, expected, rtol=1e-3, atol=1e-6):
        _refuse_kernel()


def _refuse_kernel() -> NoReturn:
    raise FileError(OTHER_KERNEL) from None


def _sample(state: DetectorState, tensors: dict[str, Tensor], kernel: Kernel | None) -> Batch | None:
    """Return one sample, stored or random, to score as a test; None if it is large."""
    samples = _probe(tensors, state.reader) if state.reservoir.samples is None else state.reservoir.samples
    if samples is None and kernel is None:
        samples = state.reader.random(1)
    if samples is None or sum(t[0].numel() for t in named(samples).values()) > LARGEST_TRIAL:
        return None
    return map_batch(lambda t: t[:1], samples)


def _forms(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (t.shape, t.dtype) for name, t in tensors.items()}
