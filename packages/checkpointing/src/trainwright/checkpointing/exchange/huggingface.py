"""Folders of safetensors files as Hugging Face's libraries write them, read where needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trainwright.checkpointing.errors import (
    DamagedCheckpointError,
    NoCheckpointError,
)
from trainwright.checkpointing.protocol import Files
from trainwright.checkpointing.state.dtypes import require_little_endian
from trainwright.checkpointing.state.header import parse_json
from trainwright.collectives import Box

from .lazy import LazyTensor, Piece, Source
from .readers import Folder
from .safetensors_file import SafetensorsFile, StoredTensor, read_safetensors_file
from .showing import show

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
_DCP_SHARDING = "DCP_SHARDING_INFO"  # what PyTorch's HuggingFaceStorageWriter says of its pieces
_MAX_INDEX_BYTES = 1 << 28


def open_huggingface(
    folder: str | Path, *, files: Files | None = None, follow_links: bool = False
) -> Source:
    """Return the tensors of a folder of safetensors files; they are read when they are asked for.

    What counts, in this order: the files that ``model.safetensors.index.json`` names,
    ``model.safetensors``, or all ``*.safetensors`` where PyTorch's `HuggingFaceStorageWriter` has
    written pieces of tensors. The format has no checksums: sizes are all that can be compared.

    Args:
        folder: The folder.
        files: The file system; None: this machine's.
        follow_links: Whether files may be links that lead out of the folder, as in the cache of
            the Hugging Face hub.

    Raises:
        NoCheckpointError: There is no such folder, or none of these files in it.
        UntrustedError: A name leads out of the folder.
        DamagedCheckpointError: A file is missing or contradicts itself or the index.
        NotAvailableYetError: A dtype is not known.
    """
    require_little_endian()
    opened = Folder(Path(folder), files, follow_links)
    try:
        return _open(opened)
    except BaseException:
        opened.close()
        raise


def _open(folder: Folder) -> Source:
    names = folder.names()
    if INDEX in names:
        return _open_index(folder)
    if SINGLE in names:
        return _join(folder, {SINGLE: _read(folder, SINGLE)})
    found = {name: _read(folder, name) for name in names if name.endswith(_SUFFIX)}
    if found and all(_DCP_SHARDING in file.metadata for file in found.values()):
        return _join(folder, found)
    there = f"; there is {', '.join(list(found)[:3])}" if found else ""
    raise NoCheckpointError(f"{folder.path} holds neither {INDEX} nor {SINGLE}{there}")


def _open_index(folder: Folder) -> Source:
    path = folder.path / INDEX
    value = parse_json(folder.read(INDEX, _MAX_INDEX_BYTES), path)
    places = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(places, dict):
        raise DamagedCheckpointError(f"{path} is damaged: it holds no weight_map")
    opened: dict[str, SafetensorsFile] = {}
    for name in places.values():
        if not isinstance(name, str) or name not in opened:
            opened[name] = _read(folder, name)
    problems = [
        f"{show(name)} is not in {place}"
        for name, place in places.items()
        if name not in opened[place].tensors
    ]
    problems += [
        f"{show(name)} of {place} is not named"
        for place, file in opened.items()
        for name in file.tensors
        if places.get(name) != place
    ]
    if problems:
        raise DamagedCheckpointError(
            f"{path} does not fit the files: {'; '.join(problems[:5])}"
            + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        )
    return _join(folder, opened)


def _read(folder: Folder, name: str) -> SafetensorsFile:
    return read_safetensors_file(folder.file(name), folder.path / str(name))


def _join(folder: Folder, opened: Mapping[str, SafetensorsFile]) -> Source:
    pieces: dict[str, list[tuple[Box, StoredTensor]]] = {}
    aliases: dict[str, str] = {}
    for name, file in opened.items():
        corners = _corners(file, folder.path / name)
        for key, stored in file.tensors.items():
            start = corners.get(key, (0,) * len(stored.shape))
            stop = tuple(map(sum, zip(start, stored.shape, strict=True)))
            pieces.setdefault(key, []).append((Box(start, stop), stored))
        # How safetensors' save_model tells of a name that it left out for another one.
        aliases |= {k: v for k, v in file.metadata.items() if k not in pieces and v in file.tensors}
    tensors = {name: _tensor(folder, name, found) for name, found in pieces.items()}
    left_out = {name: kept for name, kept in aliases.items() if name not in tensors}
    return Source(tensors, {}, {}, left_out, folder.close)


def _tensor(folder: Folder, name: str, found: list[tuple[Box, StoredTensor]]) -> LazyTensor:
    first, stored = found[0]
    if any(s.dtype != stored.dtype or len(b.stop) != len(first.stop) for b, s in found):
        raise DamagedCheckpointError(f"{folder.path}: the pieces of {show(name)} do not fit")
    shape = tuple(max(sizes) for sizes in zip(*(box.stop for box, _ in found), strict=True))
    cover = tuple(Piece(box, s.where.copy) for box, s in found)
    return LazyTensor(name, stored.dtype, shape, cover, str(folder.path))


def _corners(file: SafetensorsFile, path: Path) -> dict[str, tuple[int, ...]]:
    """Return the first corners of pieces, where the file says that it holds pieces."""
    if _DCP_SHARDING not in file.metadata:
        return {}
    told = parse_json(file.metadata[_DCP_SHARDING], path)
    corners: dict[str, tuple[int, ...]] = {}
    for name, stored in file.tensors.items():
        entry = told.get(name) if isinstance(told, dict) else None
        start = entry.get("saved_offsets") if isinstance(entry, dict) else None
        if not isinstance(start, list) or len(start) != len(stored.shape):
            raise DamagedCheckpointError(f"{path} is damaged: no place for the piece {show(name)}")
        if not all(type(i) is int and 0 <= i < 2**62 for i in start):
            raise DamagedCheckpointError(f"{path} is damaged: {show(name)} at {show(start)}")
        corners[name] = tuple(start)
    return corners
