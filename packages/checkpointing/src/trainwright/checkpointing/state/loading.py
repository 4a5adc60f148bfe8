"""A checkpoint's files opened with their headers, for one process that looks at all of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from trainwright.checkpointing.protocol import Files

from .catalog import Saved
from .index_reading import read_records
from .manifest import Manifest, file_name
from .tensor_file import FileRecord, TensorFile

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
