"""One load: find who holds what, compare, and only then write into the target's tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch

from trainwright.checkpointing.errors import DamagedCheckpointError
from trainwright.checkpointing.protocol import Files

from .catalog import Saved
from .dtypes import dtype_name, flat_bytes, require_little_endian
from .header import TensorInfo
from .index_reading import read_records
from .manifest import Manifest, file_name
from .tensor_file import FileRecord, TensorFile
from .tree import Leaves, TensorLeaf

Runs = list[tuple[slice, slice]]
_MAX_OPEN = 32


class OpenFiles:
    """The files of a checkpoint, opened when asked for, a bounded number at a time.

    Args:
        files: The file system.
        folder: The checkpoint.
        manifest: Its manifest.
    """

    def __init__(self, files: Files, folder: Path, manifest: Manifest) -> None:
        self._files = files
        self._folder = folder
        self._saved = Saved(folder, manifest)
        self._records: dict[int, FileRecord] | None = None
        self._open: OrderedDict[int, TensorFile] = OrderedDict()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def __len__(self) -> int:
        return self._saved.manifest.num_files

    def get(self, number: int) -> TensorFile | None:
        """Return file ``number``, or None if that rank wrote none."""
        if self._records is None:
            self._records = read_records(self._files, self._saved)
        record = self._records.get(number)
        if record is None:
            return None
        if number not in self._open:
            if len(self._open) >= _MAX_OPEN:
                self._open.popitem(last=False)[1].close()
            path = self._folder / file_name(number)
            self._open[number] = TensorFile(self._files, path, record)
        self._open.move_to_end(number)
        return self._open[number]

    def nearest_first(self, rank: int) -> Iterator[tuple[int, TensorFile]]:
        """Yield (number, file) of all files, beginning with that of ``rank``."""
        for offset in range(len(self)):
            number = (rank + offset) % len(self)
            file = self.get(number)
            if file is not None:
                yield number, file


@attrs.define(eq=False)
class Want:
    """A tensor to be filled, the runs of it found in each file, and how many elements those are."""

    leaf: TensorLeaf
    found: dict[int, Runs] = attrs.Factory(dict)
    num_found: int = 0

    def add(self, number: int, info: TensorInfo) -> None:
        """Note what file ``number`` holds of it."""
        runs = list(info.spec.overlap(self.leaf.spec))
        self.found[number] = runs
        self.num_found += sum(target.stop - target.start for _, target in runs)

    @property
    def is_complete(self) -> bool:
        """Whether enough elements were found; `check_holes` says whether they are the right."""
        return bool(self.found) and self.num_found >= self.leaf.spec.numel

    def check_holes(self) -> str | None:
        """Return what is wrong with the found runs, or None if they hold each element once."""
        if not self.found:
            return "expected a tensor, found nothing of that path"
        targets = sorted(
            (target.start, target.stop) for part in self.found.values() for _, target in part
        )
        end = 0
        for start, stop in targets:
            if start != end:
                what = "is not there" if start > end else "is there twice"
                return f"element {min(start, end)} of this rank's part {what}"
            end = stop
        if end != self.leaf.spec.numel:
            return f"only {end} of this rank's {self.leaf.spec.numel} elements are there"
        return None


def find_tensors(files: OpenFiles, leaves: Leaves, rank: int) -> tuple[list[Want], list[str]]:
    """Return the wanted tensors with the files that hold them, and a list of what does not fit.

    Headers are read, this rank's own file first, until all is found; no data is.

    Raises:
        OSError: A file cannot be read.
        DamagedCheckpointError: A header is not what was written.
    """
    wants = {path: Want(leaf) for path, leaf in leaves.tensors.items()}
    open_wants = dict(wants)
    problems: list[str] = []
    for number, file in files.nearest_first(rank):
        for path in [path for path in open_wants if path in file.tensors]:
            problem = _compare(path, wants[path].leaf, file.tensors[path])
            if problem is None:
                wants[path].add(number, file.tensors[path])
            else:
                problems.append(problem)
                del wants[path]
            if problem is not None or wants[path].is_complete:
                del open_wants[path]
        if not open_wants:
            break
    for path, want in wants.items():
        hole = want.check_holes()
        if hole is not None:
            problems.append(f"{path}: {hole}")
    return list(wants.values()), problems


def compare_plain(wanted: dict[str, Any], manifest: Manifest) -> list[str]:
    """Return which plain values are missing or left over."""
    missing = [
        f"{path}: expected a plain value, found nothing of that path"
        for path in wanted
        if path not in manifest.plain
    ]
    extra = [
        f"{path}: expected nothing of that path, found a plain value in the checkpoint"
        for path in manifest.plain
        if path not in wanted
    ]
    return missing + extra


def fill_all(files: OpenFiles, wants: Iterable[Want]) -> None:
    """Write what was found into the tensors, in place, one after the other.

    Extra memory: one block; this rank's part of the tensor too, where it is not contiguous on the
    host.

    Raises:
        OSError: A file cannot be read.
        DamagedCheckpointError: A block is not what was written.
    """
    require_little_endian()
    for want in wants:
        _fill(files, want)


def _fill(files: OpenFiles, want: Want) -> None:
    target = want.leaf.tensor
    with torch.no_grad():
        direct = target.device.type == "cpu" and target.is_contiguous()
        direct = direct and not target.is_conj() and not target.is_neg()
        host = target
        if not direct:
            host = torch.empty(target.shape, dtype=target.dtype, device="cpu")
        into = flat_bytes(host).numpy()
        for number, runs in want.found.items():
            file = files.get(number)
            if file is None:
                raise DamagedCheckpointError(f"file {number} is gone")
            file.read(want.leaf.path, runs, into)
        if direct:
            flat_bytes(host)[:0].zero_()  # tells autograd of what numpy has written
        else:
            target.detach().copy_(host)


def _compare(path: str, leaf: TensorLeaf, info: TensorInfo) -> str | None:
    expected = (leaf.spec.global_shape, dtype_name(leaf.tensor.dtype))
    found = (info.spec.global_shape, dtype_name(info.dtype))
    if expected == found:
        return None
    return f"{path}: expected {expected[0]} {expected[1]}, found {found[0]} {found[1]}"
