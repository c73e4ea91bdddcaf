"""Embeddings of inputs in a file, so that an encoder sees each input once, also after a stopped fit."""

import hashlib
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onefold.core import storage
from onefold.core.batches import batch_length, map_batch, named
from onefold.errors import FileError
from onefold.kernels.embedding import ModelOutputs, Places
from onefold.kernels.model import Encoder, ModelFeatures
from onefold.types import Batch

KIND = "embeddings"
KEY_BYTES = 16
MOST_BYTES = 2**30  # of embeddings in the file; later ones are computed again
INTERVAL = 10.0  # seconds between two writes, or more if writing takes long
SHARE = 0.1  # of the time, at most, for writing


class CachedEncoder:
    """An encoder with the embeddings of the inputs that it has seen, by a hash of each input.

    A file of another encoder, or a damaged one, is replaced.

    Args:
        encoder: Encoder.
        path: File of the embeddings.
        origin: Name, revision and checksum of the encoder.
    """

    def __init__(self, encoder: Encoder, path: Path, origin: dict[str, Any]) -> None:
        self._encoder, self._path, self._header = encoder, path, {"encoder": origin}
        self._rows = self._read()
        self._unsaved, self._saved, self._pause = 0, time.monotonic(), INTERVAL

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
        """Return the embeddings of a batch, computed for new inputs only; stages are always computed."""
        if stages or torch.compiler.is_exporting():
            return self._encoder.outputs(x, stages=stages)
        keys = _keys(x)
        new = [i for i, key in enumerate(keys) if key not in self._rows]
        if not new and not self._encoder.size:
            self._encoder.outputs(map_batch(lambda t: t[:1], x), stages=False)  # finds the embedding in the model
        rows = {key: self._rows[key] for key in keys if key in self._rows}
        if new:
            values = self._encoder.outputs(map_batch(lambda t: t[new], x), stages=False).embedding.cpu()
            rows |= {keys[i]: row for i, row in zip(new, values, strict=True)}
            self._store({keys[i]: rows[keys[i]] for i in new})
        return ModelOutputs(torch.stack([rows[key] for key in keys]))

    def flush(self) -> None:
        """Write the embeddings that are not in the file yet."""
        if self._unsaved:
            start = time.monotonic()
            inputs = torch.frombuffer(bytearray(b"".join(self._rows)), dtype=torch.uint8).reshape(-1, KEY_BYTES)
            storage.save(
                self._path, KIND, {"inputs": inputs, "values": torch.stack([*self._rows.values()])}, self._header
            )
            self._unsaved, self._saved = 0, time.monotonic()
            self._pause = max(INTERVAL, (self._saved - start) / SHARE)

    def _store(self, rows: dict[bytes, Tensor]) -> None:
        if (len(self._rows) + len(rows)) * next(iter(rows.values())).nbytes > MOST_BYTES:
            return
        self._rows |= rows
        self._unsaved += len(rows)
        if time.monotonic() - self._saved > self._pause:
            self.flush()

    def _read(self) -> dict[bytes, Tensor]:
        """Return the embeddings in the file by the hashes of their inputs; none if they are of another encoder."""
        if not self._path.exists():
            return {}
        try:
            tensors, header = storage.load(self._path, KIND)
        except FileError:
            return {}
        inputs, values = tensors.get("inputs"), tensors.get("values")
        if header != self._header or inputs is None or values is None or inputs.shape != (len(values), KEY_BYTES):
            return {}
        if inputs.dtype != torch.uint8 or values.dtype != torch.float32 or not values.isfinite().all():
            return {}
        return dict(zip(map(bytes, inputs.numpy()), values, strict=True))


def with_cache(kernel: ModelFeatures, path: Path) -> tuple[ModelFeatures, CachedEncoder]:
    """Return a kernel with a file of embeddings, and its encoder, whose `flush` writes the last ones.

    Args:
        kernel: Kernel of `from_pretrained`.
        path: File of the embeddings.
    """
    assert kernel.pretrained is not None
    encoder = CachedEncoder(kernel.encoder, path, asdict(kernel.pretrained))
    return kernel.with_encoder(encoder), encoder


def _keys(x: Batch) -> list[bytes]:
    """Return a hash of each sample, without the zeros at its end, by which texts in two batches may differ."""
    tensors = [t.contiguous().cpu().reshape(batch_length(x), -1).numpy() for t in named(x).values()]
    samples = (b"".join(t[i].tobytes() for t in tensors).rstrip(b"\0") for i in range(batch_length(x)))
    return [hashlib.blake2b(sample, digest_size=KEY_BYTES).digest() for sample in samples]
