"""The ``.metadata`` file of a DCP folder, in the classes of PyTorch that DCP expects there."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from trainwright.checkpointing.state.dtypes import parse_dtype

from .dcp_plan import Chunk, Path, join

VERSION = "1.0.0"  # the only one so far


def encode_metadata(
    objects: Sequence[tuple[Path, str, int, int]], chunks: Sequence[tuple[Chunk, str, int, int]]
) -> bytes:
    """Return the bytes of a ``.metadata`` file.

    Args:
        objects: (keys that lead to it, file, offset, length) of plain values.
        chunks: (chunk, file, offset, length) of all ranks' pieces.
    """
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    paths: dict[str, Path] = {}
    for path, file, offset, length in objects:
        name = join(path)
        paths[name] = path
        entries[name] = BytesStorageMetadata()
        places[MetadataIndex(name)] = _StorageInfo(file, offset, length)
    for chunk, file, offset, length in chunks:
        dtype = parse_dtype(chunk.dtype)
        assert dtype is not None, chunk
        start, sizes = torch.Size(chunk.box.start), torch.Size(chunk.box.shape)
        entry = entries.setdefault(
            chunk.name,
            TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(chunk.shape), []),
        )
        assert isinstance(entry, TensorStorageMetadata), chunk
        index = MetadataIndex(chunk.name, start, len(entry.chunks))
        if index in places:  # an empty tensor that several ranks hold
            continue
        paths[chunk.name] = chunk.path
        places[index] = _StorageInfo(file, offset, length)
        entry.chunks.append(ChunkStorageMetadata(offsets=start, sizes=sizes))
    metadata = Metadata(entries, paths, places, StorageMeta(), VERSION)
    return pickle.dumps(metadata, protocol=4)  # as Python 3.8 to 3.13 write it
