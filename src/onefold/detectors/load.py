"""Reading a detector back from its file, which may come from a stranger and be wrong in any way."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onefold.core import storage
from onefold.core.arguments import check_path
from onefold.core.batches import map_batch, named, pick_device
from onefold.detectors import METHODS
from onefold.detectors.alarm import Alarm
from onefold.detectors.base import KIND, Detector
from onefold.detectors.state import DetectorState
from onefold.errors import FileError, InputError, LayerError, NotEnoughMemoryError
from onefold.inputs.reader import DTYPES, Prepare, Reader
from onefold.inputs.reservoir import Reservoir
from onefold.inputs.samples import HELD_OUT, RESERVOIR_SIZE
from onefold.kernels import from_model, logits
from onefold.kernels.model import is_program
from onefold.nn.nets import finished
from onefold.types import Batch, Kernel, Model

CAPACITIES = {"reservoir": RESERVOIR_SIZE, "held": HELD_OUT}
POSITIVE = ("std", "scale", "count")  # weights that divide
LARGEST_TRIED = 2**18  # numbers in a sample that is scored once to see that the file is whole
LONGEST_LAYER = 1000  # characters of a layer's name
UNLIKE = "the kernel is not the one that this detector was fitted with (another model, layer or width)"


def load(path: str | Path, *, model: Model | Kernel | None = None, device: str = "auto") -> Detector:
    """The detector that `save` wrote, with its threshold and its memory.

    One that looks through a model of the user's own needs it again: model=net, or the kernel made of it. A file that is
    damaged, foreign or of a newer version is refused, and so is another model than that of the fit.
    """
    path = check_path(path)
    pick_device(device)
    tensors, header = storage.load(path, KIND)
    method = _method(header.get("method"), path)
    kernel = _kernel(header.get("kernel"), model, path)
    blank = _blank(method, kernel, device, path)
    try:
        return _restored(blank, tensors, header, kernel)
    except FileError as error:
        raise FileError(f"{path}: {error}") from None
    except (MemoryError, torch.OutOfMemoryError):
        raise NotEnoughMemoryError(f"{path}: does not fit into the memory of {blank.device}") from None
    except Exception as error:  # whatever is wrong with it, it is refused by name
        raise FileError(f"{path}: damaged, or made by another version ({type(error).__name__})") from None


def _method(name: Any, path: Path) -> type[Detector]:
    method = METHODS.get(name) if isinstance(name, str) else None
    if method is None:
        raise FileError(
            f"{path}: made by the method {str(name)[:40]!r}; this version of onefold has {', '.join(METHODS)}"
        )
    return method.detector_class


def _kernel(settings: Any, model: Model | Kernel | None, path: Path) -> Kernel | None:
    """The kernel of the fit, made again from the model that was handed in."""
    if settings is None:
        if model is not None:
            raise InputError(f"{path} was not fitted on a model", argument="model", hint="Load it without one.")
        return None
    if not _are_settings(settings):
        raise FileError(f"{path}: damaged, its kernel has settings that no kernel has")
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
        return logits(model) if "outputs" in settings else from_model(model, **settings)
    except (InputError, LayerError) as error:
        raise FileError(f"{path}: was fitted on another model: {error.problem}") from None


def _are_settings(settings: Any) -> bool:
    """Those of `from_model` or `logits`, or the none of a kernel that is neither."""
    if not isinstance(settings, dict) or not settings:
        return settings == {}
    layer = settings.get("layer")
    return (
        settings.keys() - {"outputs"} == {"layer", "width", "normalise", "seed"}
        and settings.get("outputs", True) is True
        and (layer is None or isinstance(layer, str | int))
        and len(str(layer)) <= LONGEST_LAYER
        and isinstance(settings["width"], int | None)
        and isinstance(settings["normalise"], int)
        and isinstance(settings["seed"], int)
    )


def _blank(method: type[Detector], kernel: Kernel | None, device: str, path: Path) -> Detector:
    """A detector of that method with settings of no importance."""
    make: Any = method
    try:
        return make(device=device) if kernel is None else make(kernel=kernel, device=device)
    except TypeError:
        wrong = "without a model" if kernel is None else "with a model"
        raise FileError(f"{path}: damaged, there is no {method.__name__} {wrong}") from None


def _restored(blank: Detector, tensors: dict[str, Tensor], header: dict[str, Any], kernel: Kernel | None) -> Detector:
    """The detector that `save` wrote; content that does not fit together raises what it may."""
    make: Any = type(blank)
    storage.check_like(header["settings"], storage.plain(blank._settings()))
    storage.check_like(header["about"], make.about_like)
    arguments = {**make._from_settings(header["settings"]), "device": str(blank.device)}
    detector: Detector = make(**arguments) if kernel is None else make(**arguments, kernel=kernel)
    reader, weights = Reader.from_json(header["reader"]), _under(tensors, "scorer.")
    scorer = _filled(detector._empty(reader, header["about"], weights), weights)
    finished(scorer, detector.device)
    state = DetectorState(
        reader=reader,
        prepare=Prepare(reader).to(detector.device),
        scorer=scorer,
        about=header["about"],
        **_memories(header["reservoirs"], tensors, reader),
    )
    detector._state = state
    if header["alarm"] is not None:
        detector._alarm = Alarm(tensors["alarm"].numpy(), header["alarm"]["fpr"], detector.seed, detector.resolution)
    _check_whole(detector, tensors, header)
    probe = _probe(tensors, reader)
    if kernel is not None:
        _check_kernel(detector, state, kernel, probe, tensors)
    _check_score(detector, state, probe)
    return detector


def _filled(scorer: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """The scorer with these weights, if they are those of such a scorer, finite, and divide by nothing that is zero."""
    if _forms(scorer.state_dict()) != _forms(weights):
        raise FileError("damaged, its tensors are not those of its settings")
    for name, tensor in weights.items():
        low, high = tensor.aminmax()  # NaN if anything is; isfinite would need the memory for another copy
        if not (low.isfinite() and high.isfinite()) or (name.rpartition(".")[2] in POSITIVE and not low > 0):
            raise FileError(f"damaged, its weights {name} are not finite, or not positive")
    scorer.load_state_dict(weights, strict=True, assign=True)
    if not all(torch.equal(tensor, weights[name]) for name, tensor in scorer.state_dict().items()):
        raise FileError("damaged, weights that are one have several values")
    return scorer


def _memories(contents: Any, tensors: dict[str, Tensor], reader: Reader) -> dict[str, Reservoir]:
    """What the detector remembers of its data; nothing, now and later, if it was saved without samples."""
    if contents is None:
        return {name: Reservoir(0, 0) for name in CAPACITIES}
    memories = {name: Reservoir.restore(contents[name], tensors, name) for name in CAPACITIES}
    for name, memory in memories.items():
        if memory.capacity > CAPACITIES[name]:
            raise FileError("damaged, it remembers more samples than any detector")
        if memory.samples is not None:
            memory.replace_samples(_checked(memory.samples, reader))
    return memories


def _probe(tensors: dict[str, Tensor], reader: Reader) -> Batch | None:
    """The samples that a kernel is known by, if the file has any."""
    found = _under(tensors, "probe.")
    return _checked(found["x"] if set(found) == {"x"} else found, reader) if found else None


def _checked(samples: Batch, reader: Reader) -> Batch:
    """Samples from a file, if they are of the kind, the shapes and exactly the types of the train data."""
    found = named(samples)
    checked = reader.check(found if reader.kind == "named" else samples)  # a file has no order, the train data had
    if any(t.dtype != DTYPES[reader.dtypes[key]] for key, t in found.items()):
        raise FileError("damaged, its samples are not of the type of its data")
    if any(t.is_floating_point() and t.isinf().any() for t in found.values()):  # NaN is a missing value of a table
        raise FileError("damaged, its samples are infinite")
    return checked


def _check_whole(detector: Detector, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """The file must be the one that this detector would write: nothing more, nothing less, nothing read otherwise."""
    own_tensors, own = detector._content(samples=header["reservoirs"] is not None)
    given = {name: t for name, t in tensors.items() if name != "similarity" and not name.startswith("probe.")}
    own["kernel"] = header["kernel"]  # another of the same effect may be handed in
    if _forms(given) != _forms(own_tensors) or not storage.same(storage.plain(own), header):
        raise FileError("damaged, or made by another version: its parts do not belong together")
    if detector.kernel is None and len(given) != len(tensors):
        raise FileError("damaged, it says what its kernel was and has none")


def _check_kernel(
    detector: Detector, state: DetectorState, kernel: Kernel, probe: Batch | None, tensors: dict[str, Tensor]
) -> None:
    """The kernel that was handed in must be the one of the fit: it finds the same samples as similar."""
    if probe is None and "similarity" not in tensors and state.reservoir.samples is None:
        return
    if probe is None:
        raise FileError("damaged, it does not say what its kernel was")
    try:
        found = detector._similarity(state, kernel, probe)
    except Exception:  # a model of the user's, on samples that may not be its own
        raise FileError(UNLIKE) from None
    expected = tensors["similarity"]
    if _forms({"": found}) != _forms({"": expected}) or not torch.allclose(found, expected, rtol=1e-3, atol=1e-6):
        raise FileError(UNLIKE)


@torch.no_grad()
def _check_score(detector: Detector, state: DetectorState, probe: Batch | None) -> None:
    """A sample, remembered or random, must get a finite score, unless it is so large that this would take long."""
    samples = probe if state.reservoir.samples is None else state.reservoir.samples
    if samples is None and detector.kernel is None:
        samples = state.reader.random(1)
    if samples is None or sum(t[0].numel() for t in named(samples).values()) > LARGEST_TRIED:
        return
    detector._over(state, lambda scorer, batch: scorer(batch), map_batch(lambda t: t[:1], samples))


def _forms(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (t.shape, t.dtype) for name, t in tensors.items()}


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
