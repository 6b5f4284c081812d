"""Checkpoints: values in one safetensors file, without pickle.

A new checkpoint replaces the old one atomically, and the old one may be kept beside it. A file that
is damaged, was written by another program or by another version is refused. `Recorder`
(recorder.py) decides what a checkpoint holds and when it is written; `Recorder._restore` resumes a
run from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor

from fedbilevel.core.codec import pack, unpack
from fedbilevel.runs.folder import digest_of, write_atomically

VERSION = "5"


def save(
    path: Path,
    value: object,
    record: Mapping[str, Any] | None = None,
    previous: Path | None = None,
) -> None:
    """Write a value to a file; a reader, or a power cut, sees either the old or the new file.

    Args:
        path: The file, which is replaced if it exists.
        value: Dicts, lists, tuples, trees, tensors, numbers, strings and `None`, nested as you
            like.
        record: What `folder.read_record` finds without reading the value, as JSON can hold it.
        previous: Where the file that is replaced is kept.

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
    metadata = {"fedbilevel": VERSION, "plain": plain}
    text = ""
    if record is not None:
        text = json.dumps(record)
        metadata |= {"record": text, "record_digest": digest_of(text.encode())}
    metadata["digest"] = _digest(plain + text, tensors)
    write_atomically(path, serialize(tensors, metadata), previous)


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
            # Copied to where PyTorch aligns tensors: in the file they begin anywhere, and kernels
            # sum in another order there, so that a resumed run would differ in the last bit.
            tensors = {name: file.get_tensor(name).clone() for name in names}
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
    record = metadata.get("record", "")
    expected = {"digest": _digest(plain + record, tensors)}
    if record:
        expected["record_digest"] = digest_of(record.encode())
    if any(metadata.get(name) != digest for name, digest in expected.items()):
        raise ValueError(f"{path} is damaged: its contents do not match its digest")
    try:
        return unpack(json.loads(plain), tensors)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} holds no value that was saved by fedbilevel") from error


def _digest(plain: str, tensors: dict[str, Tensor]) -> str:
    """Return a hash of everything that a checkpoint holds."""
    digest = hashlib.blake2b(plain.encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
