"""The ``.metadata`` of a PyTorch DCP folder, read as data and compared with itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import attrs
import torch

from trainwright.checkpointing.errors import (
    DamagedCheckpointError,
    NotAvailableYetError,
    UntrustedError,
)
from trainwright.collectives import Box

from .pickles import Maker, Record, read_pickle, record_of
from .saved_tensor import PLAIN
from .showing import show

_DCP = "torch.distributed.checkpoint.metadata"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"  # where PyTorch before 2.3 kept them
_MAX_DIMS = 64
_MAX_ELEMENTS = 2**62

Key = tuple[str, tuple[int, ...] | None]


@attrs.frozen
class Span:
    """Where a record lies: bytes of a file."""

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...]


@attrs.frozen
class TensorEntry:
    """A tensor: what it is, and its pieces with where they lie."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[tuple[Box, Span], ...]


@attrs.frozen
class DcpMetadata:
    """What a folder says of itself."""

    tensors: dict[str, TensorEntry]
    objects: dict[str, Span]
    paths: dict[str, tuple[str, ...]]


def parse_dcp_metadata(data: bytes, path: Path) -> DcpMetadata:
    """Return what the bytes of a ``.metadata`` file say.

    Raises:
        UntrustedError: They ask for anything but the classes that such files are made of.
        DamagedCheckpointError: They do not say what such a file does, or contradict themselves.
        NotAvailableYetError: The file is of a version that this package does not know.
    """
    value = read_pickle(data, _ADMITTED, path)
    try:
        return _Parser(path).parse(value)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error!r:.200}") from error


@attrs.frozen
class _Parser:
    path: Path

    def parse(self, value: Any) -> DcpMetadata:
        state = self.state(value, "Metadata")
        version = state.get("version")
        if version is not None and not (isinstance(version, str) and version.startswith("1.")):
            raise NotAvailableYetError(f"{self.path} has version {show(version)}; 1 can be read")
        spans = self.spans(state["storage_data"])
        tensors: dict[str, TensorEntry] = {}
        objects: dict[str, Span] = {}
        for name, entry in state["state_dict_metadata"].items():
            if type(entry) is not Record:
                self.refuse("an entry that is no record")
            self.text(name)
            if entry.kind == "BytesStorageMetadata":
                objects[name] = self.span(spans, (name, None))
            else:
                tensors[name] = self.tensor(name, self.state(entry, "TensorStorageMetadata"), spans)
        paths = self.paths(state.get("planner_data"), [*tensors, *objects])
        return DcpMetadata(tensors, objects, paths)

    def spans(self, storage: Any) -> dict[Key, Span]:
        found: dict[Key, Span] = {}
        for key, told in storage.items():
            index = self.state(key, "MetadataIndex")
            offset = index.get("offset")
            name = self.text(index["fqn"])
            place: Key = (name, None if offset is None else self.sizes(offset))
            if place in found:
                self.refuse(f"two places for {show(name)}")
            info = self.state(told, "_StorageInfo")
            transforms = info.get("transform_descriptors") or ()
            span = Span(
                self.text(info["relative_path"]),
                info["offset"],
                info["length"],
                tuple(self.text(transform) for transform in transforms),
            )
            for number in (span.offset, span.length):
                if type(number) is not int or not 0 <= number < _MAX_ELEMENTS:
                    self.refuse(f"a position of {show(number)}")
            found[place] = span
        self.check_disjoint(found)
        return found

    def check_disjoint(self, spans: Mapping[Key, Span]) -> None:
        """Raise if records share bytes: few bytes of a file could then stand for many of memory."""
        last = ("", 0)
        for span in sorted(spans.values(), key=lambda span: (span.file, span.offset, span.length)):
            if span.file == last[0] and span.offset < last[1]:
                self.refuse(f"two records share bytes of {show(span.file)}")
            last = (span.file, span.offset + span.length)

    def span(self, spans: Mapping[Key, Span], key: Key) -> Span:
        if key not in spans:
            self.refuse(f"no place for {show(key[0])}")
        return spans[key]

    def tensor(self, name: str, state: Mapping[str, Any], spans: Mapping[Key, Span]) -> TensorEntry:
        dtype, layout = self.properties(state["properties"])
        if layout != "torch.strided":
            raise NotAvailableYetError(f"{self.path}: {show(name)} has the layout {show(layout)}")
        shape = self.sizes(state["size"])
        pieces: list[tuple[Box, Span]] = []
        for chunk in state["chunks"]:
            told = self.state(chunk, "ChunkStorageMetadata")
            start, sizes = self.sizes(told["offsets"]), self.sizes(told["sizes"])
            if len(start) != len(shape) or len(sizes) != len(shape):
                self.refuse(f"a piece of {show(name)} of other dims")
            box = Box(start, tuple(map(sum, zip(start, sizes, strict=True))))
            box.check_within(shape)
            span = self.span(spans, (name, start))
            if box.numel * dtype.itemsize > span.length:
                self.refuse(f"{span.length} bytes for {box.numel} elements of {show(name)}")
            pieces.append((box, span))
        return TensorEntry(dtype, shape, tuple(pieces))

    def properties(self, value: Any) -> tuple[torch.dtype, str]:
        state = self.record(value, "TensorProperties").state
        dtype, layout = state[:2] if type(state) is tuple else (state["dtype"], state["layout"])
        if not isinstance(dtype, torch.dtype) or not isinstance(layout, str):
            self.refuse("a tensor of no dtype")
        return dtype, layout

    def paths(self, planner: Any, names: list[str]) -> dict[str, tuple[str, ...]]:
        """Return the paths of what is stored; planners may keep anything there."""
        if not isinstance(planner, dict):
            return {}
        return {
            name: tuple(str(key) for key in planner[name])
            for name in names
            if isinstance(planner.get(name), tuple)
            and all(type(key) in (str, int) for key in planner[name])
        }

    def text(self, value: Any) -> str:
        if type(value) is not str:
            self.refuse(f"{show(value)} where a name is expected")
        return value

    def sizes(self, value: Any) -> tuple[int, ...]:
        if type(value) is not tuple or len(value) > _MAX_DIMS:
            self.refuse("a shape that is none")
        if not all(type(size) is int and 0 <= size < _MAX_ELEMENTS for size in value):
            self.refuse("a shape of no sensible sizes")
        if math.prod(max(size, 1) for size in value) > _MAX_ELEMENTS:
            self.refuse("a shape of too many elements")
        return value

    def record(self, value: Any, kind: str) -> Record:
        if type(value) is not Record or value.kind != kind:
            self.refuse(f"a {type(value).__name__} where {kind} is expected")
        return value

    def state(self, value: Any, kind: str) -> Mapping[str, Any]:
        state = self.record(value, kind).state
        if type(state) is not dict:
            self.refuse(f"a {kind} without state")
        return state

    def refuse(self, what: str) -> NoReturn:
        raise DamagedCheckpointError(f"{self.path} is damaged: it says {what}")


def _layout(name: Any) -> str:
    return str(name) if isinstance(name, str) else "unknown"


def _path(*parts: Any) -> str:
    """Return a path, which nothing here ever opens."""
    return "/".join(part for part in parts if isinstance(part, str))


def _member(owner: Any, name: Any) -> Record:
    """Return a memory format; Python 3.11.0 to 3.11.3 pickle enums as ``getattr(class, name)``."""
    if owner not in (_FORMATS, _OLD_FORMATS) or not isinstance(name, str):
        raise UntrustedError("the name 'builtins.getattr' of something else than a memory format")
    return Record("_MEM_FORMAT_ENCODING")


_FORMATS = record_of("_MEM_FORMAT_ENCODING")
_OLD_FORMATS = record_of("_MEM_FORMAT_ENCODING")
_ADMITTED: Mapping[str, Any] = {
    **PLAIN,
    **{
        f"{_DCP} {name}": record_of(name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
        )
    },
    f"{_DCP} _MEM_FORMAT_ENCODING": _FORMATS,
    f"{_OLD} TensorProperties": record_of("TensorProperties"),
    f"{_OLD} MEM_FORMAT_ENCODING": _OLD_FORMATS,
    "builtins getattr": Maker(_member),
    "torch.distributed.checkpoint.filesystem _StorageInfo": record_of("_StorageInfo"),
    "torch.serialization _get_layout": Maker(_layout),
    **{
        f"{module} {name}": Maker(_path)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}
