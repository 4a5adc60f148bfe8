"""Tables of Apache Arrow: Parquet files, and folders that `datasets` has saved."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainwright.integration.data.sources import files
from trainwright.integration.data.sources.holding_out import split_rows
from trainwright.integration.data.sources.jsonl import named
from trainwright.integration.data.sources.record import Record, record_of
from trainwright.integration.errors import ConfigError, DataError
from trainwright.integration.outside_files import read_object

BATCH_ROWS = 1024


class Tables:
    """Rows of Arrow tables, of which one column is read, a row group or batch at a time.

    Args:
        source: the file or folder that holds them.
        paths: the files of tables.
        parquet: whether these are Parquet files, not Arrow streams.
        column: name of the column with the text, or the messages.
        chat: whether the column holds messages.

    Raises:
        ConfigError: pyarrow is missing.
    """

    skipped: tuple[str, ...] = ()

    def __init__(
        self, source: Path, paths: list[Path], *, parquet: bool, column: str, chat: bool = False
    ) -> None:
        self.arrow = _pyarrow()
        self.source = source
        self.paths = paths
        self.parquet = parquet
        self.column = column
        self.chat = chat

    @property
    def files(self) -> int:
        """Number of files."""
        return len(self.paths)

    def split(self, share: float) -> Iterator[tuple[bool, Record]]:
        """Go through the rows, each with whether it is held out."""
        return split_rows(self._rows, share, str(self.source))

    def fingerprint(self) -> str:
        """Return hexadecimal digits that change with names and contents."""
        return files.fingerprint_of(self.paths, self.source)

    def _rows(self) -> Iterator[Record]:
        for path in self.paths:
            name = files.relative_name(path, self.source)
            read = self._parquet_batches if self.parquet else self._stream_batches
            number = 0
            try:
                for column in read(path):
                    # Offsets that lead out of a buffer would be followed.
                    column.validate(full=True)
                    for value in column.to_pylist():
                        where = f"{path} row {number}"
                        yield record_of(f"{name}#{number}", value, chat=self.chat, where=where)
                        number += 1
            except DataError:
                raise
            except (self.arrow.ArrowException, OSError, ValueError) as error:
                raise DataError(f"cannot read {path} as a table: {error}") from error

    def _parquet_batches(self, path: Path) -> Iterator[Any]:
        import pyarrow.parquet  # type: ignore[import-untyped]

        with pyarrow.parquet.ParquetFile(path) as file:
            self._check_column(path, file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=[self.column]):
                yield batch.column(0)

    def _stream_batches(self, path: Path) -> Iterator[Any]:
        with self.arrow.memory_map(str(path)) as mapped, self.arrow.ipc.open_stream(mapped) as file:
            self._check_column(path, file.schema.names)
            for batch in file:
                yield batch.column(self.column)

    def _check_column(self, path: Path, names: list[str]) -> None:
        if self.column not in names:
            raise DataError(
                f"{path} has no column {self.column!r}; it has {', '.join(map(repr, names))}: "
                "name one with --text-field"
            )


def parquet_files(source: Path, column: str, *, chat: bool = False) -> Tables:
    """Return the rows of a Parquet file, or of all of them below a folder.

    Raises:
        DataError: there is no such file.
        ConfigError: pyarrow is missing.
    """
    paths = named(source, (".parquet",))
    return Tables(source, paths, parquet=True, column=column, chat=chat)


def saved_dataset(folder: Path, column: str, *, chat: bool = False) -> Tables:
    """Return the rows of a data set that ``save_to_disk`` of `datasets` has written.

    Raises:
        DataError: the folder holds several splits, or what it lists is not there.
        ConfigError: pyarrow is missing.
    """
    splits = folder / "dataset_dict.json"
    if os.path.exists(splits):
        known = _json(splits).get("splits")
        raise DataError(
            f"{folder} holds the splits {known}; give the folder of one of them, and perhaps "
            "another with --held-out"
        )
    state = _json(folder / "state.json")
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise DataError(
            f"{folder} holds a selection by row numbers; flatten_indices() before save_to_disk"
        )
    listed = state.get("_data_files")
    try:
        paths = [folder / entry["filename"] for entry in listed or ()]
    except (TypeError, KeyError) as error:
        raise DataError(f"{folder / 'state.json'} lists no files under _data_files") from error
    missing = [path.name for path in paths if not os.path.isfile(path)]
    if missing or not paths:
        raise DataError(f"{folder} lacks the files {missing} that its state.json lists")
    return Tables(folder, paths, parquet=False, column=column, chat=chat)


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}") from error


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(
            "Parquet files and saved data sets need pyarrow: pip install 'trainwright[parquet]'"
        ) from error
    return pyarrow
