"""Writes what a load has found into the target's tensors, block by verified block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from trainwright.checkpointing.errors import (
    DamagedCheckpointError,
    LoadFailedError,
    MismatchError,
)
from trainwright.checkpointing.protocol import Files

from .dtypes import flat_bytes, require_little_endian, to_bytes
from .index import DataFile
from .manifest import file_name
from .matching import Want
from .piece_file import PieceFile

_MAX_OPEN = 32
_MAX_NAMED = 5


class DataFiles:
    """A checkpoint's files of tensors, opened when asked for, a bounded number at a time.

    Args:
        files: The file system.
        folder: The checkpoint.
    """

    def __init__(self, files: Files, folder: Path) -> None:
        self._files = files
        self._folder = folder
        self._open: OrderedDict[int, PieceFile] = OrderedDict()

    def __enter__(self) -> DataFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def get(self, file: DataFile) -> PieceFile:
        """Return the file, open.

        Raises:
            OSError: It cannot be opened.
            DamagedCheckpointError: It has another length.
        """
        if file.number not in self._open:
            if len(self._open) >= _MAX_OPEN:
                self._open.popitem(last=False)[1].close()
            path = self._folder / file_name(file.number)
            self._open[file.number] = PieceFile.open(self._files, path, file)
        self._open.move_to_end(file.number)
        return self._open[file.number]

    def close(self) -> None:
        """Close what is open; what is asked for later is opened again."""
        while self._open:
            self._open.popitem()[1].close()


def fill_all(files: DataFiles, wants: Sequence[Want]) -> None:
    """Write what was found into the tensors, in place, one after the other.

    Extra memory: none where a tensor is contiguous on the host and of the stored dtype; else this
    rank's part of one tensor.

    Raises:
        DamagedCheckpointError: A block is not what was written.
        MismatchError: Names that the target ties have different values in the checkpoint.
        LoadFailedError: A file cannot be read. Each of them says what was overwritten before.
    """
    require_little_endian()
    for number, want in enumerate(wants):
        try:
            fill(files, want)
        except (DamagedCheckpointError, MismatchError) as error:
            raise type(error)(f"{error}; {_overwritten(wants, number)}") from error
        except OSError as error:
            raise LoadFailedError(
                f"{type(error).__name__}: {error}; {_overwritten(wants, number)}"
            ) from error


def fill(files: DataFiles, want: Want) -> None:
    """Write what was found of one tensor into it; `fill_all` says more.

    Raises:
        OSError: A file cannot be read.
        DamagedCheckpointError: A block is not what was written.
        MismatchError: Names that the target ties have different values in the checkpoint.
    """
    target, dtype = want.leaf.tensor, want.located.dtype
    with torch.no_grad():
        direct = target.device.type == "cpu" and target.is_contiguous() and not want.is_tied
        direct = direct and not target.is_conj() and not target.is_neg() and target.dtype == dtype
        host = target if direct else torch.empty(target.shape, dtype=dtype, device="cpu")
        into = flat_bytes(host).numpy()
        for piece in want.located.pieces:
            file = files.get(piece.file)
            file.read(piece, dtype, piece.spec.overlap(want.leaf.spec), into)
        if direct:
            flat_bytes(host)[:0].zero_()  # tells autograd of what numpy has written
        elif want.is_tied:
            _check_same(want, host)
        else:
            target.detach().copy_(host)


def _check_same(want: Want, host: torch.Tensor) -> None:
    target = want.leaf.tensor.detach()
    there = torch.empty_like(host).copy_(target) if host.dtype != target.dtype else target
    if not np.array_equal(np.frombuffer(to_bytes(there), np.uint8), flat_bytes(host).numpy()):
        raise MismatchError(
            f"{want.leaf.path}: the target gives it the memory of another path, and the checkpoint "
            "has different values for the two; give it memory of its own, or skip one of them"
        )


def _overwritten(wants: Sequence[Want], number: int) -> str:
    """Return what the target has become when the load of tensor ``number`` failed."""
    named = [want.leaf.path for want in wants[:number]]
    if len(named) > _MAX_NAMED:
        named = [*named[:_MAX_NAMED], "..."]
    before = f"{number} of this rank's {len(wants)} tensors had been overwritten"
    before += f" ({', '.join(named)})" if named else ""
    return (
        f"{before}, {wants[number].leaf.path} perhaps in part, and so may be those of other ranks: "
        "load another step before they are used"
    )
