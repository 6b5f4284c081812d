"""The content of the data sets that our results are from, as checksums.

Files differ from copy to copy, because every program compresses in its own way; pixels, features
and labels do not.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# SHA-256 of the content, by the name of the file. Those of MNIST are from files whose bytes, once
# unpacked, have the checksums that its authors' files have.
KNOWN = {
    "train-images-idx3-ubyte.gz": (  # with the labels
        "9d049fdace7642d752bc92af41ea3c81b58ed1731a6ba3d80477a8e25212a77e"
    ),
    "t10k-images-idx3-ubyte.gz": (
        "bbd7e63b42a3018bf0b22aebcf38c1478af3ccb0f28d1b17dc829e6ac6e67e0b"
    ),
    "train.parquet": "13aa481cc5dbcd2b654e0ed65fd6655d98dd579bd7f011bc5f8de5f03a19399b",
    "test.parquet": "3ec4a96b9cd5004bd9205c502b781903bba0dee6740dd5cccfa37e7cd2d38f77",
    "covtype.npz": "4767606b9071b079aa37ea3f4b2d63ada98bd506f4588a27231830efd87059c6",
    "omniglot28.npz": "320c7a944120d39f9ee2f1f05a99610d3b1ae07ec4c40ef94d5268fa0b22d54e",
}


def digest(*arrays: NDArray[np.generic]) -> str:
    """Return the SHA-256 of arrays of small whole numbers, whatever their dtypes.

    Args:
        *arrays: The arrays, with numbers from -32768 to 32767.

    Returns:
        The digest of their shapes and numbers, as hexadecimal text.

    Examples:
        >>> import numpy as np
        >>> digest(np.array([1, 2], "uint8")) == digest(np.array([1, 2], "int64"))
        True
        >>> digest(np.array([1, 2])) == digest(np.array([[1, 2]]))
        False
    """
    state = hashlib.sha256()
    for array in arrays:
        state.update(repr(array.shape).encode())
        for part in np.array_split(array, max(1, array.size // 2**20)):  # 2 MB each
            state.update(part.astype("<i2").tobytes())
    return state.hexdigest()


def compare(file: Path, *arrays: NDArray[np.generic]) -> None:
    """Warn in one line if a file of a data set has other content than the copy that we know.

    Args:
        file: The file; its name says which data set it is of.
        *arrays: What was read from it.
    """
    found = digest(*arrays)
    known = KNOWN[file.name]
    if found != known:
        logging.getLogger("fedbilevel").warning(
            "%s is not the copy that our results are from: "
            "the SHA-256 of its content is %s, not %s",
            file,
            found,
            known,
        )
