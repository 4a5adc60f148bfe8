"""Checkpoints of one format written as those of another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from trainwright.checkpointing.errors import CheckpointingError, MismatchError, TreeError
from trainwright.checkpointing.protocol import Files
from trainwright.checkpointing.state.comparing import Contents, Readable
from trainwright.checkpointing.state.store import StateStore
from trainwright.collectives import Box
from trainwright.collectives.shard_spec import ShardSpec

from .dcp_writing import write_dcp
from .huggingface_writing import WrittenFolder, write_huggingface
from .lazy import LazyTensor, Piece, Source


@attrs.frozen(eq=False)
class Imported:
    """The contents of a foreign folder under paths as this package has them.

    Args:
        contents: Tensors and plain values by path.
        refused: Values that cannot be plain values here, by path with the reason.
        changed: Paths of values that had tuples, which are lists now.
    """

    contents: Contents
    refused: dict[str, str]
    changed: tuple[str, ...]


def import_source(source: Source, prefix: str = "") -> Imported:
    """Return what an open foreign folder holds; tensors are still read when asked for.

    Paths are the keys that lead to an entry, joined by ``/``, where the folder tells them, else
    ``prefix`` and the name there. Names that are aliases have the tensor that they stand for.
    """
    tensors: dict[str, Readable] = {}
    for name, tensor in source.tensors.items():
        tensors[_path(source, name, prefix)] = tensor
    for name, kept in source.aliases.items():
        tensors[_path(source, name, prefix)] = source.tensors[kept]
    plain: dict[str, Any] = {}
    refused: dict[str, str] = {}
    changed: list[str] = []
    for name, entry in source.objects.items():
        path = _path(source, name, prefix)
        try:
            value = entry.read()
            plain[path] = _to_plain(value)
        except (CheckpointingError, ValueError) as error:
            refused[path] = str(error)
            continue
        if _has_tuples(value):
            changed.append(path)
    return Imported(Contents(tensors, plain), refused, tuple(changed))


def to_dcp(contents: Contents, folder: str | Path, files: Files | None = None) -> None:
    """Write contents as a new DCP folder; at most 256 MiB of a tensor are held at a time.

    Raises:
        TreeError, SaveFailedError: See `write_dcp`.
    """
    write_dcp(folder, _tree(contents, lazy=True), files=files)


def to_huggingface(
    contents: Contents,
    folder: str | Path,
    *,
    prefix: str = "model/",
    max_file_bytes: int = 5_000_000_000,
    files: Files | None = None,
) -> WrittenFolder:
    """Write the tensors whose paths begin with ``prefix``, without it, as safetensors.

    Raises:
        MismatchError: There are none.
        TreeError, SaveFailedError: See `write_huggingface`.
    """
    lazy: dict[int, LazyTensor] = {}
    weights: dict[str, torch.Tensor | LazyTensor] = {}
    for path, tensor in contents.tensors.items():
        if path.startswith(prefix):
            known = lazy.setdefault(id(tensor), lazy_tensor(path, tensor))
            weights[path.removeprefix(prefix)] = known
    if not weights:
        first = ", ".join(sorted({path.partition("/")[0] + "/" for path in contents.tensors})[:5])
        raise MismatchError(f"no tensor has a path that begins with {prefix!r}; there are {first}")
    return write_huggingface(folder, weights, max_file_bytes=max_file_bytes, files=files)


def to_store(
    contents: Contents,
    root: str | Path,
    step: int,
    *,
    run: str | None = None,
    files: Files | None = None,
) -> Path:
    """Save contents as a checkpoint of this package, all tensors in one file.

    Extra memory: all tensors.

    Returns:
        The checkpoint's folder.

    Raises:
        TreeError, SaveFailedError: See `StateStore.save`.
    """
    return StateStore(root, run=run, files=files).save(step, _tree(contents, lazy=False))


def lazy_tensor(name: str, tensor: Readable) -> LazyTensor:
    """Return what `write_dcp` and `write_huggingface` take, of a tensor of any source."""
    if isinstance(tensor, LazyTensor):
        return tensor
    shape = tuple(tensor.shape)

    def copy(box: Box, into: torch.Tensor) -> None:
        part = tensor.read(ShardSpec.of_boxes(name, shape, [box]))
        into.copy_(part.view(box.shape))

    return LazyTensor(name, tensor.dtype, shape, (Piece(Box.full(shape), copy),), name)


def _tree(contents: Contents, *, lazy: bool) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    read: dict[int, torch.Tensor] = {}
    for path, tensor in contents.tensors.items():
        if lazy:
            _put(tree, path, lazy_tensor(path, tensor))
            continue
        if id(tensor) not in read:  # a tied weight stays one tensor
            read[id(tensor)] = tensor.read(ShardSpec.full(path, tensor.shape))
        _put(tree, path, read[id(tensor)])
    for path, value in contents.plain.items():
        _put(tree, path, value)
    return tree


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *outer, last = path.split("/")
    for key in outer:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise TreeError(f"{path} leads through an entry that is no dictionary")
    if last in tree:
        raise TreeError(f"there are two entries of the path {path}")
    tree[last] = value


def _path(source: Source, name: str, prefix: str) -> str:
    keys = source.paths.get(name)
    return prefix + name if keys is None else "/".join(keys)


def _to_plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    if isinstance(value, Mapping):
        if not all(type(key) is str for key in value):
            raise ValueError("a dictionary whose keys are no strings")
        return {key: _to_plain(item) for key, item in value.items()}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ValueError(f"a {type(value).__name__} is no plain value")


def _has_tuples(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tuples, value.values()))
    return isinstance(value, tuple) or (isinstance(value, list) and any(map(_has_tuples, value)))
