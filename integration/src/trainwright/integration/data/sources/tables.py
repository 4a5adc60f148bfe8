"""Tables of Apache Arrow: Parquet files, and folders that `datasets` has saved."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainwright.integration.data.sources.record import Record, record_of
from trainwright.integration.data.sources.row_files import RowFiles, named
from trainwright.integration.errors import ConfigError, DataError
from trainwright.integration.outside_files import read_object

BATCH_ROWS = 1024

Batches = Callable[[Path, str], Iterator[Any]]
"""Goes through a column of a file, a row group or batch at a time."""


def parquet_files(source: Path, column: str, *, chat: bool = False) -> RowFiles:
    """Return the rows of a Parquet file, or of all of them below a folder.

    Args:
        source: the file or folder.
        column: name of the column with the text, or the messages.
        chat: whether the column holds messages.

    Raises:
        DataError: there is no such file.
        ConfigError: pyarrow is missing.
    """
    _pyarrow()
    read = functools.partial(_rows, column=column, chat=chat, batches=_parquet_batches)
    return RowFiles(source, named(source, (".parquet",)), read)


def saved_dataset(folder: Path, column: str, *, chat: bool = False) -> RowFiles:
    """Return the rows of a data set that ``save_to_disk`` of `datasets` has written.

    Args:
        folder: the folder.
        column: name of the column with the text, or the messages.
        chat: whether the column holds messages.

    Raises:
        DataError: the folder holds several splits, or what it lists is not there.
        ConfigError: pyarrow is missing.
    """
    _pyarrow()
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
    leading = [path.name for path in paths if path.parent != folder]
    if leading:
        raise DataError(
            f"{folder / 'state.json'} lists files of other folders, such as {leading[0]}"
        )
    missing = [path.name for path in paths if not os.path.isfile(path)]
    if missing or not paths:
        raise DataError(f"{folder} lacks the files {missing} that its state.json lists")
    read = functools.partial(_rows, column=column, chat=chat, batches=_stream_batches)
    return RowFiles(folder, paths, read)


def _rows(path: Path, name: str, *, column: str, chat: bool, batches: Batches) -> Iterator[Record]:
    number = 0
    try:
        for batch in batches(path, column):
            # Offsets that lead out of a buffer would be followed.
            batch.validate(full=True)
            for value in batch.to_pylist():
                where = f"{path} row {number}"
                yield record_of(f"{name}#{number}", value, chat=chat, where=where)
                number += 1
    except DataError:
        raise
    except (_pyarrow().ArrowException, OSError, ValueError) as error:
        raise DataError(f"cannot read {path} as a table: {error}") from error


def _parquet_batches(path: Path, column: str) -> Iterator[Any]:
    import pyarrow.parquet  # type: ignore[import-untyped]

    with pyarrow.parquet.ParquetFile(path) as file:
        _check_column(path, column, file.schema_arrow.names)
        for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=[column]):
            yield batch.column(0)


def _stream_batches(path: Path, column: str) -> Iterator[Any]:
    arrow = _pyarrow()
    with arrow.memory_map(str(path)) as mapped, arrow.ipc.open_stream(mapped) as file:
        _check_column(path, column, file.schema.names)
        for batch in file:
            yield batch.column(column)


def _check_column(path: Path, column: str, names: list[str]) -> None:
    if names.count(column) != 1:
        told = "several columns" if column in names else "no column"
        raise DataError(
            f"{path} has {told} {column!r}; it has {', '.join(map(repr, names))}: "
            "name one with --text-field"
        )


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
