"""Networks in a file small enough to share: half precision, bytes for the largest, nothing that a seed gives."""

import torch
from torch import Tensor

LARGEST = 4_000_000  # numbers; a tensor with more is kept in bytes: the heads of ten members would be 24 MB
SCALE = ".scale"


def packed(networks: dict[str, Tensor]) -> dict[str, Tensor]:
    """Half precision; of the largest each column in bytes, as 127ths of its largest number. Priors are left out."""
    found: dict[str, Tensor] = {}
    for name, tensor in networks.items():
        if ".prior." in name:
            continue
        if tensor.numel() <= LARGEST:
            found[name] = tensor.to(torch.float16)
            continue
        largest = tensor.abs().amax(-2, keepdim=True).clamp(min=1e-12)
        found[name] = ((tensor / largest * 127).round() + 128).to(torch.uint8)
        found[name + SCALE] = largest.to(torch.float32)
    return found


def unpacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `packed` was given, but for rounding and the priors."""
    return {
        name: (tensor.float() - 128) * tensors[name + SCALE] / 127 if tensor.dtype == torch.uint8 else tensor.float()
        for name, tensor in tensors.items()
        if not name.endswith(SCALE)
    }
