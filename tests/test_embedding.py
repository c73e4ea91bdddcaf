"""The embedding of a model: the tensor that its authors document, of models with random weights.

Every expected value is computed from the model's own calls: `forward_head` of timm's forms, entries of transformers'
outputs, a pooling written out here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Generator, Tensor, nn

from onefold.errors import LayerError
from onefold.kernels import ModelFeatures, from_model

TEXT: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 32,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
SMALL_MAPS: dict[str, Any] = {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 2, 1, 1]}


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
