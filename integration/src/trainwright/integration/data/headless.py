"""Files of tokens that others have made: mapped where they are, their last part held out."""

from __future__ import annotations

from pathlib import Path

import attrs
import numpy as np

from trainwright.integration.data.source_entry import HELD_OUT, TRAIN, SourceEntry
from trainwright.integration.data.sources.megatron import map_indexed, prefix_of
from trainwright.integration.data.sources.nanogpt import map_tokens
from trainwright.integration.errors import DataError


def headless_entry(
    entry: SourceEntry, path: Path, kind: str, dtype: str, beside: Path, share: float
) -> SourceEntry:
    """Complete the entry of a file of tokens, all of whose header is checked here.

    Args:
        entry: what is known of it already.
        path: the file.
        kind: ``nanogpt`` or ``megatron``.
        dtype: of the tokens of nanoGPT's files.
        beside: what names of new files begin with.
        share: share of tokens, or of documents where they are listed, that is held out: the last.

    Raises:
        DataError: the file is missing, truncated, or says what is not so.
    """
    if kind == "nanogpt":
        tokens, ends = map_tokens(path, dtype), None
        cut = len(tokens) - int(len(tokens) * share)
    else:
        indexed = map_indexed(path)
        tokens, ends, path = indexed.tokens, indexed.ends, Path(f"{prefix_of(path)}.bin")
        cut = _cut(path, ends, share)
        np.save(_ends_path(beside), ends)
    return attrs.evolve(
        entry,
        place=str(path),
        parts=(TRAIN, HELD_OUT) if cut < len(tokens) else (TRAIN,),
        dtype=tokens.dtype.str,
        tokens=len(tokens),
        cut=cut,
        ends=None if ends is None else _ends_path(beside).name,
    )


def _ends_path(beside: Path) -> Path:
    return beside.with_name(f"{beside.name}.ends.npy")


def _cut(path: Path, ends: np.ndarray, share: float) -> int:
    if not share:
        return int(ends[-1])
    held_out = max(1, int(len(ends) * share))
    cut = int(ends[-1 - held_out]) if len(ends) > held_out else 0
    if not cut:
        raise DataError(
            f"{path} holds one document, of which none can be held out; give --held-out PATH"
        )
    return cut
