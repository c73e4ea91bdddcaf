"""Files: written whole or not at all; tensors in safetensors with a JSON header; no pickle anywhere."""

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor

from onefold.errors import FileError

FORMAT = 1


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that a reader or a crash sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write JSON, whole or not at all."""
    write_bytes(path, (json.dumps(content, indent=2) + "\n").encode())


def save(path: Path, kind: str, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write named tensors and a JSON header of a given kind."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    about = {"format": FORMAT, "kind": kind, "sha256": _digest(plain, header), "header": dict(header)}
    write_bytes(path, to_safetensors(plain, metadata={"onefold": json.dumps(about)}))


def load(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save` wrote; refuse anything else by name."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        tensors = parse_safetensors(content)
        length = int.from_bytes(content[:8], "little")
        about = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["onefold"])
        version, found, digest, header = (about[key] for key in ("format", "kind", "sha256", "header"))
    except (SafetensorError, ValueError, KeyError, TypeError):
        raise FileError(f"{path}: damaged, or not a file of onefold") from None
    if version != FORMAT:
        raise FileError(f"{path}: has format {version}, this version of onefold reads format {FORMAT}")
    if found != kind:
        raise FileError(f"{path}: is a {found}, a {kind} was expected")
    if digest != _digest(tensors, header):
        raise FileError(f"{path}: damaged, its content does not match its checksum")
    return tensors, header


def fingerprint(*parts: Any) -> str:
    """A hash of settings (anything JSON can hold) and tensors: equal if and only if all parts are equal."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            text = f"{part.dtype}{tuple(part.shape)}"
            content = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        else:
            text, content = "json", json.dumps(part, sort_keys=True, default=repr).encode()
        digest.update(f"{text}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()


def _digest(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> str:
    names = sorted(tensors)
    return fingerprint(dict(header), names, *(tensors[name] for name in names))
