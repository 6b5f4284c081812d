"""Checkpoints: one file, replaced at once, tensors without pickle, refused when damaged or foreign."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor

from fedbilevel.core.codec import pack, unpack

VERSION = "3"


def save(path: Path, value: Any) -> None:
    """Write a nest of dicts, lists, tuples, trees, tensors, numbers and strings; a reader sees the old or the new."""
    tensors: dict[str, Tensor] = {}
    plain = json.dumps(pack(value, tensors))
    metadata = {"fedbilevel": VERSION, "plain": plain, "digest": _digest(plain, tensors)}
    temporary = path.with_name(path.name + ".new")
    try:
        temporary.write_bytes(serialize(tensors, metadata))
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def load(path: Path) -> Any:
    """What `save` was given."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is not a readable checkpoint ({str(error).splitlines()[0]})"
        ) from error
    if metadata.get("fedbilevel") != VERSION:
        found = metadata.get("fedbilevel")
        what = f"is a checkpoint of version {found}" if found else "was not written by fedbilevel"
        raise ValueError(f"{path} {what}; this version reads checkpoints of version {VERSION}")
    plain = metadata.get("plain", "")
    if metadata.get("digest") != _digest(plain, tensors):
        raise ValueError(f"{path} is damaged: its contents do not match its digest")
    return unpack(json.loads(plain), tensors)


def _digest(plain: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(plain.encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
