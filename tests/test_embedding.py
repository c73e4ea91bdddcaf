"""The embedding of a model: the tensor that its authors document, of models with random weights.

Every expected value is computed from the model's own calls: `forward_head` of timm's forms, entries of transformers'
outputs, a pooling written out here.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from test_methods import SHORT, SMALL
from torch import Generator, Tensor, nn
from torch.nn import functional as F  # noqa: N812
from users_models import ResNet, TextClassifier, regressor

import onefold
from onefold.errors import FileError, LayerError, NotEnoughMemoryError
from onefold.kernels import from_model, logits
from onefold.nn.nets import MLP, backbone

TEXT: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 32,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
SMALL_MAPS: dict[str, Any] = {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 2, 1, 1]}


LABELS: dict[str, Any] = {"num_labels": 3}


def first_token(output: Any, _: Tensor) -> Tensor:
    return output.last_hidden_state[:, 0]


def pooled(output: Any, _: Tensor) -> Tensor:
    return output.pooler_output.flatten(1)


def all_tokens(output: Any, _: Tensor) -> Tensor:
    return output.last_hidden_state.mean(1)


def all_positions(output: Any, _: Tensor) -> Tensor:
    return output.last_hidden_state.mean((2, 3))


def words(output: Any, mask: Tensor) -> Tensor:
    """The mean over tokens that are no padding, one sample after the other."""
    rows = zip(output.last_hidden_state, mask, strict=True)
    return torch.stack([tokens[real.bool()].mean(0) for tokens, real in rows])


@dataclass(frozen=True)
class Documented:
    """A model, what its authors document as the embedding, and how the kernel describes it."""

    make: Callable[[], nn.Module]
    embedding: Callable[[Any, Tensor], Tensor]
    description: str


IMAGES = {
    "DINOv2": Documented(lambda: hf.Dinov2Model(hf.Dinov2Config(**VISION)), pooled, "16 numbers, pooler_output"),
    "CLIP vision": Documented(
        lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**VISION)), pooled, "16 numbers, pooler_output"
    ),
    "CLIP vision with projection": Documented(
        lambda: hf.CLIPVisionModelWithProjection(hf.CLIPVisionConfig(**VISION, projection_dim=12)),
        lambda output, _: output.image_embeds,
        "12 numbers, image_embeds",
    ),
    "SigLIP vision": Documented(
        lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**VISION)), pooled, "16 numbers, pooler_output"
    ),
    "ViT": Documented(
        lambda: hf.ViTModel(hf.ViTConfig(**VISION)), first_token, "16 numbers, class token of last_hidden_state"
    ),
    "DeiT": Documented(
        lambda: hf.DeiTModel(hf.DeiTConfig(**VISION)), first_token, "16 numbers, class token of last_hidden_state"
    ),
    "ViT without a pooler": Documented(
        lambda: hf.ViTModel(hf.ViTConfig(**VISION), add_pooling_layer=False),
        all_tokens,
        "16 numbers, mean of last_hidden_state",
    ),
    "BEiT": Documented(lambda: hf.BeitModel(hf.BeitConfig(**VISION)), pooled, "16 numbers, pooler_output"),
    "Swin": Documented(
        lambda: hf.SwinModel(
            hf.SwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=2)
        ),
        pooled,
        "16 numbers, pooler_output",
    ),
    "ResNet": Documented(
        lambda: hf.ResNetModel(hf.ResNetConfig(embedding_size=8, **SMALL_MAPS)), pooled, "20 numbers, pooler_output"
    ),
    "ConvNeXt": Documented(
        lambda: hf.ConvNextModel(hf.ConvNextConfig(patch_size=2, **SMALL_MAPS)), pooled, "20 numbers, pooler_output"
    ),
    "SegFormer": Documented(
        lambda: hf.SegformerModel(
            hf.SegformerConfig(hidden_sizes=[8, 8, 12, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2])
        ),
        all_positions,
        "16 numbers, mean of last_hidden_state",
    ),
}
TEXTS = {
    "BERT": Documented(lambda: hf.BertModel(hf.BertConfig(**TEXT)), words, "16 numbers, mean of last_hidden_state"),
    "RoBERTa": Documented(
        lambda: hf.RobertaModel(hf.RobertaConfig(**TEXT)), words, "16 numbers, mean of last_hidden_state"
    ),
    "MPNet": Documented(lambda: hf.MPNetModel(hf.MPNetConfig(**TEXT)), words, "16 numbers, mean of last_hidden_state"),
    "DistilBERT": Documented(
        lambda: hf.DistilBertModel(hf.DistilBertConfig(vocab_size=40, dim=16, n_layers=4, n_heads=2, hidden_dim=24)),
        words,
        "16 numbers, mean of last_hidden_state",
    ),
    "ALBERT": Documented(
        lambda: hf.AlbertModel(hf.AlbertConfig(**TEXT, embedding_size=8)),
        words,
        "16 numbers, mean of last_hidden_state",
    ),
    "T5 encoder": Documented(
        lambda: hf.T5EncoderModel(hf.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=4, num_heads=2)),
        words,
        "16 numbers, mean of last_hidden_state",
    ),
    "CLIP text with projection": Documented(
        lambda: hf.CLIPTextModelWithProjection(hf.CLIPTextConfig(**TEXT, projection_dim=12, eos_token_id=39)),
        lambda output, _: output.text_embeds,
        "12 numbers, text_embeds",
    ),
}


def sentences(n: int = 5, length: int = 9) -> dict[str, Tensor]:
    """Padded token numbers; every sentence has another length."""
    generator = Generator().manual_seed(n + length)
    mask = (torch.arange(length) < torch.randint(2, length, (n, 1), generator=generator)).long()
    return {"input_ids": torch.randint(3, 40, (n, length), generator=generator) * mask, "attention_mask": mask}


def images(n: int = 3, channels: int = 3, size: int = 16) -> Tensor:
    return torch.rand(n, channels, size, size, generator=Generator().manual_seed(n))


def model_of(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().eval()


@pytest.mark.parametrize("name", IMAGES)
def test_image_encoders_of_transformers_give_the_documented_embedding(name: str) -> None:
    case = IMAGES[name]
    size = 64 if name in ("ResNet", "ConvNeXt", "SegFormer") else 16
    net, x = model_of(case.make), images(size=size)
    with torch.no_grad():
        expected = case.embedding(net(pixel_values=x), x)
    for batch in (x, {"pixel_values": x}):
        kernel = from_model(net, width=None)
        torch.testing.assert_close(kernel.encode(batch), expected, rtol=0, atol=1e-6)
        assert kernel.description == case.description
    assert repr(kernel) == f"ModelFeatures(features: {case.description})"


@pytest.mark.parametrize("name", TEXTS)
def test_text_encoders_of_transformers_give_the_documented_embedding(name: str) -> None:
    case, x = TEXTS[name], sentences()
    net = model_of(case.make)
    kernel = from_model(net, width=None)
    with torch.no_grad():
        expected = case.embedding(net(**x), x["attention_mask"])
    torch.testing.assert_close(kernel.encode(x), expected, rtol=0, atol=1e-6)
    mean = " under attention_mask" if case.embedding is words else ""
    assert kernel.description == case.description + mean


# --- classifier heads -------------------------------------------------------------------------------------------------

HEADS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "BERT": (lambda: hf.BertForSequenceClassification(hf.BertConfig(**TEXT, **LABELS)), "classifier"),
    "RoBERTa": (
        lambda: hf.RobertaForSequenceClassification(hf.RobertaConfig(**TEXT, **LABELS)),
        "classifier.out_proj",
    ),
    "ViT": (lambda: hf.ViTForImageClassification(hf.ViTConfig(**VISION, **LABELS)), "classifier"),
    "ResNet": (
        lambda: hf.ResNetForImageClassification(hf.ResNetConfig(embedding_size=8, **LABELS, **SMALL_MAPS)),
        "classifier.1",
    ),
    "own CNN": (lambda: ResNet(3), "fc"),
    "own transformer": (TextClassifier, "head"),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_classifier_gives_the_input_of_its_head_and_its_logits(name: str) -> None:
    make, head = HEADS[name]
    net = model_of(make)
    x: Any = images(size=32 if name == "ResNet" else 16) if name in ("ViT", "ResNet", "own CNN") else sentences(4, 12)
    kernel, entered = from_model(net, width=None), []
    hook = net.get_submodule(head).register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    with torch.no_grad():
        output = net(**x) if isinstance(x, dict) else net(x)
    hook.remove()
    outputs = kernel.outputs(x)
    assert outputs.logits is not None
    torch.testing.assert_close(outputs.embedding, entered[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(outputs.logits, getattr(output, "logits", output), rtol=0, atol=1e-6)
    assert kernel.description == f"{entered[0].shape[1]} numbers, input of {head}"


def test_a_causal_classifier_gives_the_token_that_its_logits_come_from() -> None:
    config = hf.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, **LABELS, pad_token_id=0, bos_token_id=1,
                           eos_token_id=2)  # fmt: skip
    net, x = model_of(lambda: hf.GPT2ForSequenceClassification(config)), sentences()
    with torch.no_grad():
        hidden, expected = net.get_submodule("transformer")(**x).last_hidden_state, net(**x).logits
    last = x["attention_mask"].sum(1) - 1
    outputs = from_model(net).outputs(x)
    torch.testing.assert_close(outputs.embedding, hidden[torch.arange(len(last)), last], rtol=0, atol=1e-6)
    torch.testing.assert_close(outputs.logits, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("end", [nn.Softmax(1), nn.LogSoftmax(1), nn.Sigmoid(), nn.Identity()])
def test_logits_are_those_before_the_last_normalisation(end: nn.Module) -> None:
    torch.manual_seed(0)
    trunk, head, x = nn.Sequential(nn.Linear(5, 8), nn.ReLU()), nn.Linear(8, 3), torch.rand(4, 5)
    outputs = from_model(nn.Sequential(trunk, head, end)).outputs(x)
    torch.testing.assert_close(outputs.embedding, trunk(x).detach())
    torch.testing.assert_close(outputs.logits, head(trunk(x)).detach())


def test_one_real_output_is_no_logit() -> None:
    outputs = from_model(regressor()).outputs(torch.rand(4, 5))
    assert outputs.embedding.shape == (4, 32)
    assert outputs.logits is None


# --- timm and sentence-transformers, by small models with their interfaces --------------------------------------------


class TimmTransformer(nn.Module):
    """The interface of timm's VisionTransformer."""

    def __init__(self, num_classes: int, global_pool: str) -> None:
        super().__init__()
        self.num_classes, self.global_pool = num_classes, global_pool
        self.patch_embed = nn.Conv2d(3, 16, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 16))
        layers = [nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True, norm_first=True) for _ in range(6)]
        self.blocks = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, num_classes) if num_classes else nn.Identity()

    def forward_features(self, x: Tensor) -> Tensor:
        tokens = self.patch_embed(x).flatten(2).transpose(1, 2)
        return self.norm(self.blocks(torch.cat([self.cls_token.expand(x.shape[0], -1, -1), tokens], 1)))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = x[:, 0] if self.global_pool == "token" else x[:, 1:].mean(1)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


class TimmConvolutions(nn.Module):
    """The interface of timm's MobileNetV3, whose convolution after the pooling belongs to the head."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.conv_stem, self.blocks = nn.Conv2d(3, 8, 3, 2, 1), nn.Sequential(nn.Conv2d(8, 12, 3, 2, 1), nn.ReLU())
        self.global_pool, self.conv_head = nn.AdaptiveAvgPool2d(1), nn.Conv2d(12, 20, 1)
        self.classifier = nn.Linear(20, num_classes) if num_classes else nn.Identity()

    def forward_features(self, x: Tensor) -> Tensor:
        return self.blocks(self.conv_stem(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = F.hardswish(self.conv_head(self.global_pool(x))).flatten(1)
        return x if pre_logits else self.classifier(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


@pytest.mark.parametrize("num_classes", [0, 3])
@pytest.mark.parametrize("pool", ["token", "avg"])
def test_transformers_of_timm_give_their_pre_logits(num_classes: int, pool: str) -> None:
    net, x = model_of(lambda: TimmTransformer(num_classes, pool)), images()
    assert isinstance(net, TimmTransformer)
    with torch.no_grad():
        tokens = net.forward_features(x)
        expected = tokens[:, 0] if pool == "token" else tokens[:, 1:].mean(1)
    kernel = from_model(net)
    outputs = kernel.outputs(x)
    torch.testing.assert_close(outputs.embedding, expected, rtol=0, atol=1e-6)
    assert kernel.description == "16 numbers, pre-logits of forward_head"
    assert (outputs.logits is None) == (num_classes == 0)
    if outputs.logits is not None:
        torch.testing.assert_close(outputs.logits, net(x).detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_classes", [0, 3])
def test_convolutional_networks_of_timm_give_their_pre_logits(num_classes: int) -> None:
    net, x = model_of(lambda: TimmConvolutions(num_classes)), images()
    assert isinstance(net, TimmConvolutions)
    with torch.no_grad():
        maps = net.blocks(net.conv_stem(x))
        expected = F.hardswish(maps.mean((2, 3)) @ net.conv_head.weight.flatten(1).T + net.conv_head.bias)
    torch.testing.assert_close(from_model(net).encode(x), expected, rtol=0, atol=1e-6)


class SentenceTransformer(nn.Sequential):
    """The interface of sentence-transformers: one dict of inputs, to which each module adds entries."""

    def forward(self, input: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:  # noqa: A002  # pyright: ignore
        for module in self:
            input = module(input)  # noqa: A001
        return input


class WordVectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 8)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        features["token_embeddings"] = self.table(features["input_ids"])
        return features


class LargestToken(nn.Module):
    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        real = features["attention_mask"][..., None].bool()
        tokens = features["token_embeddings"].masked_fill(~real, -torch.inf)
        features["sentence_embedding"] = F.normalize(tokens.amax(1), dim=1)
        return features


def test_models_of_sentence_transformers_give_their_own_pooling() -> None:
    net, x = model_of(lambda: SentenceTransformer(WordVectors(), LargestToken())), sentences()
    kernel = from_model(net)
    expected = net({**x})["sentence_embedding"].detach()
    torch.testing.assert_close(kernel.encode(x), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(kernel.encode(x).norm(dim=1), torch.ones(5))
    assert kernel.description == "8 numbers, sentence_embedding"
    assert set(x) == {"input_ids", "attention_mask"}


# --- anything else ----------------------------------------------------------------------------------------------------


def test_a_model_without_a_head_gives_its_output() -> None:
    torch.manual_seed(0)
    rows = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8))
    maps = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU())
    x, z = images(), torch.rand(4, 5)
    torch.testing.assert_close(from_model(rows).encode(z), rows(z).detach())
    torch.testing.assert_close(from_model(maps).encode(x), maps(x).mean((2, 3)).detach())
    assert from_model(maps).outputs(x).logits is None


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(9, 4), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.embed(x))


def test_a_model_without_an_embedding_is_refused_with_its_modules() -> None:
    x = torch.zeros(3, 7, dtype=torch.long)
    message = r"layer: no embedding is known for the output of Tokens \(\[N, 7, 4\]\)\. Its modules: embed \[N, 7, 4\]"
    with pytest.raises(LayerError, match=message + r", .*Name the module whose output to use, such as layer='layer'\."):
        from_model(Tokens()).encode(x)
    assert from_model(Tokens(), "layer").encode(x).shape == (3, 28)

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(5, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x + 1, self.dense(x)

    with pytest.raises(LayerError, match=r"output of Pair \(\[N, 5\], \[N, 2\]\)"):
        from_model(Pair()).encode(torch.rand(3, 5))


def test_padded_batches_of_other_lengths_give_the_same_embeddings() -> None:
    net, x = model_of(TEXTS["BERT"].make), sentences(4, 6)
    padded = {name: F.pad(values, (0, 5)) for name, values in x.items()}
    for kernel in (from_model(net), from_model(model_of(HEADS["BERT"][0]))):
        short, long = kernel.outputs(x), kernel.outputs(padded)
        torch.testing.assert_close(long.embedding, short.embedding, rtol=0, atol=1e-6)
        torch.testing.assert_close(long.stages, short.stages, rtol=0, atol=1e-6)


# --- pooled stages ----------------------------------------------------------------------------------------------------


def channels(*maps: Tensor) -> Tensor:
    return torch.cat([part for m in maps for part in (m.mean((2, 3)), m.amax((2, 3)))], 1).detach()


def test_stages_of_convolutional_networks_end_where_the_resolution_falls() -> None:
    net, x = model_of(lambda: ResNet(3)), images()
    assert isinstance(net, ResNet)
    first = net.layer1(net.relu(net.bn1(net.conv1(x))))
    torch.testing.assert_close(from_model(net).outputs(x).stages, channels(first, net.layer2(first)))

    plain = nn.Sequential(nn.Identity(), nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3),
                          nn.ReLU(), nn.Flatten(), nn.Linear(150, 3))  # fmt: skip
    torch.testing.assert_close(from_model(plain).outputs(x).stages, channels(plain[:3](x), plain[:6](x)))

    impala = backbone((3, 16, 16), channels=(4, 6), hidden=(8,), outputs=3, generator=Generator().manual_seed(0))
    trunk: Any = impala.trunk
    expected = channels(trunk[:1](x), trunk[:5](x), trunk(x).relu())
    torch.testing.assert_close(from_model(impala).outputs(x).stages, expected)


@pytest.mark.parametrize(("name", "stages"), [("ResNet", 4), ("ConvNeXt", 4)])
def test_stages_of_transformers_library_are_its_own_stages(name: str, stages: int) -> None:
    """The library returns the maps of the stem and of every stage as hidden states."""
    net, x = model_of(IMAGES[name].make), images(size=64)
    with torch.no_grad():
        hidden = net(x, output_hidden_states=True).hidden_states
    values = from_model(net).outputs(x).stages
    assert values is not None
    torch.testing.assert_close(values[:, -channels(*hidden[-stages:]).shape[1] :], channels(*hidden[-stages:]))


def test_stages_skip_the_layers_of_a_block_that_come_before_its_stride() -> None:
    config = hf.EfficientNetConfig(
        **LABELS, width_coefficient=0.25, depth_coefficient=0.25, hidden_dim=320, image_size=64
    )
    net, x = model_of(lambda: hf.EfficientNetForImageClassification(config)), images(size=64)
    kernel = from_model(net)
    kernel.encode(x)
    names = [stage["module"] for stage in kernel.settings["places"]["stages"]]
    assert names[:-1] == [f"efficientnet.encoder.blocks.{i}" for i in (0, 1, 2, 4)]
    with torch.no_grad():
        last = net.get_submodule("efficientnet")(x).last_hidden_state
    values = kernel.outputs(x).stages
    assert values is not None
    torch.testing.assert_close(values[:, -640:], channels(last))


def test_stages_of_transformers_are_class_tokens_after_each_quarter_of_the_blocks() -> None:
    net, x = model_of(lambda: TimmTransformer(3, "token")), images()
    assert isinstance(net, TimmTransformer)
    tokens = net.patch_embed(x).flatten(2).transpose(1, 2)
    tokens, expected = torch.cat([net.cls_token.expand(3, -1, -1), tokens], 1), []
    with torch.no_grad():
        for i, block in enumerate(net.blocks):
            tokens = block(tokens)
            expected += [tokens[:, 0]] if i in (1, 2, 4, 5) else []  # 1.5, 3, 4.5 and 6 blocks, rounded up
    torch.testing.assert_close(from_model(net).outputs(x).stages, torch.cat(expected, 1), rtol=0, atol=1e-6)


def test_stages_of_texts_are_means_of_tokens_that_are_no_padding() -> None:
    net, x = model_of(TEXTS["BERT"].make), sentences()
    with torch.no_grad():
        hidden = net(**x, output_hidden_states=True).hidden_states[1:]
    real = x["attention_mask"].bool()
    rows = [torch.cat([layer[i, real[i]].mean(0) for layer in hidden]) for i in range(5)]
    torch.testing.assert_close(from_model(net).outputs(x).stages, torch.stack(rows), rtol=0, atol=1e-6)


def test_stages_of_mlps_are_their_hidden_layers() -> None:
    torch.manual_seed(0)
    net, x = MLP(5, [8, 6], 3), torch.rand(4, 5)
    first = net.hidden[0](x).relu()
    expected = torch.cat([first, net.hidden[1](first).relu()], 1).detach()
    torch.testing.assert_close(from_model(net).outputs(x).stages, expected)
    assert from_model(nn.Linear(5, 3)).outputs(x).stages is None


# --- one pass, other precisions, files, export ------------------------------------------------------------------------


def test_outputs_are_one_pass_after_a_first_one_of_two_samples() -> None:
    net, x, sizes = ResNet(3).train(), images(5), []
    net.conv1.register_forward_hook(lambda _module, _args, output: sizes.append(len(output)))
    kernel = from_model(net)
    assert kernel.description == ""
    assert repr(kernel) == "ModelFeatures(features: determined at the first batch)"
    outputs = kernel.outputs(x)
    assert sizes == [2, 5]
    torch.testing.assert_close(kernel.encode(x), outputs.embedding, rtol=0, atol=0)
    assert sizes == [2, 5, 5]
    assert net.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules() if m is not net.conv1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_in_half_precision_give_float32(dtype: torch.dtype) -> None:
    net, x = model_of(lambda: ResNet(3)), images()
    exact, half = from_model(net).outputs(x), from_model(model_of(lambda: ResNet(3)).to(dtype)).outputs(x)
    for a, b in zip(exact, half, strict=True):
        assert a is not None
        assert b is not None
        assert b.dtype == torch.float32
        torch.testing.assert_close(b, a, rtol=0.02, atol=0.02)


def test_what_does_not_fit_into_memory_is_refused_before_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onefold.kernels.embedding.available", lambda _: 2**20)
    monkeypatch.setattr("onefold.kernels.model.available", lambda _: 2**20)
    net = nn.Conv2d(3, 200, 1)
    with pytest.raises(NotEnoughMemoryError, match=r"embedding of 2,000 samples with 51,200 .*Name a layer after the"):
        from_model(nn.Sequential(net), "0").encode(torch.zeros(2000, 3, 16, 16))
    with pytest.raises(NotEnoughMemoryError, match="a random layer of 2,048 features on an embedding of 200 numbers"):
        from_model(net).features(images())


@pytest.mark.parametrize("name", ["BERT", "own CNN"])
def test_a_loaded_detector_reads_the_same_places(name: str, tmp_path: Path) -> None:
    net = model_of(HEADS[name][0])
    x: Any = sentences(40, 12) if name == "BERT" else images(40).numpy()
    detector = onefold.KNN(from_model(net)).fit(x)
    assert isinstance(detector.kernel, onefold.kernels.ModelFeatures)
    detector.save(tmp_path / "x.onefold")
    loaded = onefold.load(tmp_path / "x.onefold", model=model_of(HEADS[name][0]))
    assert isinstance(loaded.kernel, onefold.kernels.ModelFeatures)
    assert loaded.kernel.settings == detector.kernel.settings
    np.testing.assert_array_equal(loaded.score(x), detector.score(x))
    a, b = (kernel.outputs(torch.as_tensor(x) if name != "BERT" else x) for kernel in (detector.kernel, loaded.kernel))
    assert a.stages is not None
    assert b.stages is not None
    torch.testing.assert_close(a.stages, b.stages, rtol=0, atol=0)
    with pytest.raises(FileError, match="fitted on another model: Linear has no layer"):
        onefold.load(tmp_path / "x.onefold", model=nn.Linear(3, 2))


class Outputs(nn.Module):
    """Embedding, logits and stages as one output, to trace them."""

    def __init__(self, net: nn.Module, example: Tensor) -> None:
        super().__init__()
        self.kernel = from_model(net)
        self.kernel.encode(example)

    def forward(self, x: Tensor) -> Any:
        return tuple(self.kernel.outputs(x))


@pytest.mark.parametrize("make", [lambda: ResNet(3), lambda: TimmTransformer(3, "avg")], ids=["CNN", "transformer"])
def test_outputs_can_be_exported(make: Callable[[], nn.Module]) -> None:
    net, x = model_of(make), images(4)
    module = Outputs(net, x)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for actual, expected in zip(program.module()(images(7)), module.kernel.outputs(images(7)), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_a_detector_on_a_classifier_is_exported_to_onnx(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    net, x = model_of(lambda: ResNet(3)), images(60).numpy()
    detector = onefold.CSD(from_model(net, width=32), recipe=SHORT, architecture=SMALL).fit(x)
    detector.export(tmp_path / "d.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "d.onnx")
    np.testing.assert_allclose(session.run(None, {"x": x})[0], detector.score(x), rtol=1e-3, atol=1e-4)


# --- exported programs ------------------------------------------------------------------------------------------------


class WithEmbedding(nn.Module):
    """A classifier that also returns its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Sequential(nn.Linear(5, 8), nn.ReLU()), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.trunk(x)
        return self.head(z), z


def program_of(net: nn.Module, x: Tensor) -> Any:
    buffer, batch = io.BytesIO(), torch.export.Dim("batch")
    torch.export.save(torch.export.export(net.eval(), (x,), dynamic_shapes=({0: batch},)), buffer)
    buffer.seek(0)
    return torch.export.load(buffer)


def test_programs_give_what_they_return() -> None:
    torch.manual_seed(0)
    x, net, maps = torch.rand(4, 5), WithEmbedding(), nn.Conv2d(3, 6, 3)
    kernel = from_model(program_of(net, x))
    outputs = kernel.outputs(x)
    torch.testing.assert_close(outputs.embedding, net.trunk(x).detach())
    torch.testing.assert_close(outputs.logits, net(x)[0].detach())
    torch.testing.assert_close(logits(program_of(net, x)).encode(x), net(x)[0].detach())
    assert kernel.description == "8 numbers, second output of the program"
    alone = from_model(program_of(net.trunk, x)).outputs(x)
    torch.testing.assert_close(alone.embedding, net.trunk(x).detach())
    assert alone.logits is None
    kernel = from_model(program_of(maps, images()))
    torch.testing.assert_close(kernel.encode(images()), maps(images()).mean((2, 3)).detach())
    assert kernel.description == "6 numbers, mean of the program's output over positions"
    tokens = torch.zeros(3, 7, dtype=torch.long)
    with pytest.raises(LayerError, match=r"the exported model returns no embedding \(\[N, 7, 4\]\)\. Name a layer, or"):
        from_model(program_of(Tokens(), tokens)).encode(tokens)
