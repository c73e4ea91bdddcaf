"""Compression of networks for small files: half precision, 8 bits for the largest tensors, no random priors."""

import torch
from torch import Tensor

LARGEST_HALF = 4_000_000  # elements; larger tensors take 8 bits each: the heads of ten members would be 24 MB
SCALE = ".scale"


def compress(networks: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights in half precision, and large matrices as 8-bit integers with a scale per column.

    Random priors are left out: the seed of a run determines them.
    """
    compressed: dict[str, Tensor] = {}
    for name, tensor in networks.items():
        if ".prior." in name:
            continue
        if tensor.numel() <= LARGEST_HALF:
            compressed[name] = tensor.to(torch.float16)
            continue
        largest = tensor.abs().amax(-2, keepdim=True).clamp(min=1e-12)
        compressed[name] = ((tensor / largest * 127).round() + 128).to(torch.uint8)
        compressed[name + SCALE] = largest.to(torch.float32)
    return compressed


def decompress(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of `compress` in float32, rounded and without priors."""
    return {
        name: (tensor.float() - 128) * tensors[name + SCALE] / 127 if tensor.dtype == torch.uint8 else tensor.float()
        for name, tensor in tensors.items()
        if not name.endswith(SCALE)
    }
