"""Token files without a header, as nanoGPT's preparation writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trainwright.integration.errors import DataError

TOKEN_DTYPES = ("uint16", "uint32")
MAGIC_NUMBERS = (20240520, 20240801)
"""The first word of files of llm.c and its heirs, which have a header."""


def map_tokens(path: Path, dtype: str) -> np.ndarray:
    """Map a file of little-endian tokens.

    Args:
        path: the file.
        dtype: ``uint16`` or ``uint32``.

    Raises:
        DataError: the file is missing, empty, has a header or half a token.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(4)
    except OSError as error:
        raise DataError(f"cannot read the token file {path}: {error}") from error
    width = np.dtype(dtype).itemsize
    if not size or size % width:
        raise DataError(
            f"token file {path} has {size} bytes, no whole number of tokens of {dtype}; "
            "--token-dtype says what it holds"
        )
    if int.from_bytes(first, "little") in MAGIC_NUMBERS:
        raise DataError(
            f"token file {path} has a header, as llm.c writes it; nanoGPT's files have none: cut "
            "the first 1,024 bytes off"
        )
    return np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")
