"""Checkpoints: values in one safetensors file, without pickle.

A new checkpoint replaces the old one atomically. A file that is damaged, was written by another
program or by another version is refused. `Recorder` (recorder.py) decides what a checkpoint holds
and when it is written; `Recorder._restore` resumes a run from it.
"""

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

VERSION = "5"


def save(path: Path, value: object) -> None:
    """Write a value to a file; a reader sees either the old or the new file.

    Args:
        path: The file, which is replaced if it exists.
        value: Dicts, lists, tuples, trees, tensors, numbers, strings and `None`, nested as you
            like.

    Raises:
        TypeError: If the value holds anything else; the file is left alone.
        OSError: If the file cannot be written.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "a.safetensors")
        ...     save(file, {"round": 3, "x": torch.ones(2)})
        ...     load(file)
        {'round': 3, 'x': tensor([1., 1.])}
    """
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
    """Read a value from a file that `save` has written.

    Args:
        path: The file.

    Returns:
        The value, with its tensors on the CPU.

    Raises:
        ValueError: If the file cannot be read, is damaged, or is not a checkpoint of this version.

    Examples:
        >>> from pathlib import Path
        >>> load(Path("missing.safetensors"))
        Traceback (most recent call last):
        ValueError: missing.safetensors is not a readable checkpoint (...)
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is not a readable checkpoint ({reason})") from error
    version = metadata.get("fedbilevel")
    if not version:
        raise ValueError(
            f"{path} was not written by fedbilevel; "
            f"this version reads checkpoints of version {VERSION}"
        )
    if version != VERSION:
        raise ValueError(
            f"{path} is a checkpoint of version {version}; "
            f"this version reads checkpoints of version {VERSION}"
        )
    plain = metadata.get("plain", "")
    if metadata.get("digest") != _digest(plain, tensors):
        raise ValueError(f"{path} is damaged: its contents do not match its digest")
    return unpack(json.loads(plain), tensors)


def _digest(plain: str, tensors: dict[str, Tensor]) -> str:
    """Return a hash of everything that a checkpoint holds."""
    digest = hashlib.blake2b(plain.encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
