"""Readers of the folders of others: PyTorch's distributed checkpoints and safetensors files.

Their pickles are programs, written by whoever made the folder. That reading one runs, imports and
opens nothing is heard from Python's audits, whatever the reader returns or raises.
"""

from __future__ import annotations

import encodings.cp437  # noqa: F401  # else `zipfile` imports it for a name not in UTF-8
import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch

from tests.fuzz_checkpoints import contents, put, same_tensors
from tests.fuzzing import Reader
from tests.running_nothing import running_nothing
from trainwright.checkpointing.errors import CheckpointingError
from trainwright.checkpointing.exchange import (
    open_dcp,
    open_huggingface,
    write_dcp,
    write_huggingface,
)
from trainwright.checkpointing.exchange.archive import Archive
from trainwright.checkpointing.exchange.dcp_metadata import parse_dcp_metadata
from trainwright.checkpointing.exchange.lazy import Source
from trainwright.checkpointing.exchange.objects import check_plain, read_object
from trainwright.checkpointing.exchange.pickles import read_pickle
from trainwright.checkpointing.exchange.saved_tensor import ADMITTED, find_storage
from trainwright.checkpointing.testing.files import CrashingFiles

PLACE = Path("/imports/a")
_ERRORS = (CheckpointingError,)


@attrs.frozen
class InMemory:
    """A file of some bytes."""

    data: bytes

    @property
    def size(self) -> int:
        """Its length."""
        return len(self.data)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill the buffer from a position."""
        part = self.data[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        return len(part)


def _dcp_files() -> CrashingFiles:
    files = CrashingFiles()
    tensors = {
        "model": {"w": torch.arange(6.0).view(2, 3), "b": torch.tensor(3, dtype=torch.int64)},
        "half": torch.ones(4, dtype=torch.bfloat16),
    }
    write_dcp(PLACE, {**tensors, "steps": [1, "a", {"x": (2.5, None)}]}, files=files)
    return files


def _read_all(source: Source) -> object:
    with source:
        tensors = {name: tensor.read() for name, tensor in source.tensors.items()}
        objects = {name: value.read() for name, value in source.objects.items()}
        return tensors, objects, dict(source.paths), dict(source.aliases)


def metadata_files() -> Reader:
    """Return the reader of ``.metadata`` files, of every protocol that pickles have."""
    whole = contents(_dcp_files(), PLACE / ".metadata")
    value = pickle.loads(whole)
    seeds = [pickle.dumps(value, protocol) for protocol in (2, 3, 4, 5)]

    def read(data: bytes) -> object:
        with running_nothing():
            return parse_dcp_metadata(data, PLACE)

    return Reader(read, seeds, _ERRORS)


def metadata_programs() -> Reader:
    """Return the reader of pickles made of whole instructions, the evil ones among them.

    An input is a list of numbers of `_INSTRUCTIONS`: single bytes seldom meet to a program.
    """
    listed = (b"]", b"\x94", b"(", b"N", b"K\1", b"h\0", b"e", b"0", b"N")
    dictionary = (b"}", b"(", b"X\1\0\0\0a", b"N", b"X\1\0\0\0b", b"K\1", b"\x85", b"u")
    called = (b"ctorch\nSize\n", b"K\1", b"K\2", b"\x86", b"\x85", b"R")
    ordered = (b"ccollections\nOrderedDict\n", b")", b"R", b"X\1\0\0\0a", b"K\0", b"s")
    stored = (
        *(b"ctorch._utils\n_rebuild_tensor_v2\n", b"(", b"(", _text("storage")),
        *(b"ctorch\nFloatStorage\n", b"X\1\0\0\0a", _text("cpu"), b"K\1", b"t", b"Q"),
        *(b"K\0", b"K\1", b"\x85", b"K\1", b"\x85", b"\x89"),
        *(b"ccollections\nOrderedDict\n", b")", b"R", b"t", b"R"),
    )
    programs = (listed, dictionary, called, ordered, stored)
    seeds = [bytes(map(_INSTRUCTIONS.index, program)) for program in programs]

    def read(data: bytes) -> object:
        program = b"".join(_INSTRUCTIONS[number % len(_INSTRUCTIONS)] for number in data)
        with running_nothing():
            value = read_pickle(b"\x80\x04" + program + b".", ADMITTED, PLACE, find_storage)
            check_plain(value, PLACE, len(program))
        return repr(value)[:10_000]

    return Reader(read, seeds, _ERRORS)


def dcp_folders() -> Reader:
    """Return the reader of whole folders, of which the ``.metadata`` is damaged."""
    files = _dcp_files()
    seed = contents(files, PLACE / ".metadata")

    def read(data: bytes) -> object:
        put(files, PLACE / ".metadata", data)
        with running_nothing():
            return _read_all(open_dcp(PLACE, files=files))

    return Reader(read, [seed], _ERRORS, same_tensors)


def dcp_pieces() -> Reader:
    """Return the reader of whole folders, of which the file of tensors is damaged."""
    files = _dcp_files()
    seed = contents(files, PLACE / "__0_0.distcp")

    def read(data: bytes) -> object:
        put(files, PLACE / "__0_0.distcp", data)
        with running_nothing():
            return _read_all(open_dcp(PLACE, files=files))

    return Reader(read, [seed], _ERRORS, same_tensors)


def saved_objects() -> Reader:
    """Return the reader of what `torch.save` writes; the pickle is damaged, the archive fits it."""
    stored = {"w": torch.arange(6.0).view(2, 3).t(), "b": torch.ones(1, dtype=torch.int32)}
    stream = io.BytesIO()
    torch.save({**stored, "n": [1, (2, "x")]}, stream)
    with zipfile.ZipFile(stream) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    (pickled,) = (name for name in records if name.endswith("/data.pkl"))

    def read(data: bytes) -> object:
        rebuilt = io.BytesIO()
        with zipfile.ZipFile(rebuilt, "w", zipfile.ZIP_STORED) as archive:
            for name, record in {**records, pickled: data}.items():
                archive.writestr(zipfile.ZipInfo(name), record)
        whole = InMemory(rebuilt.getvalue())
        with running_nothing():
            return read_object(Archive(whole, 0, whole.size, "x"))

    return Reader(read, [records[pickled]], _ERRORS, same_tensors)


def _huggingface_files(max_file_bytes: int) -> CrashingFiles:
    files = CrashingFiles()
    names = ("w", "b", "layers.0.w", "layers.1.w")
    tensors: dict[str, Any] = {name: torch.arange(6.0).view(2, 3) + 1 for name in names}
    tensors["twin"] = tensors["w"]
    write_huggingface(PLACE, tensors, max_file_bytes=max_file_bytes, files=files)
    return files


def safetensors_indexes() -> Reader:
    """Return the reader of folders whose index is damaged."""
    files = _huggingface_files(50)
    index = PLACE / "model.safetensors.index.json"
    seed = contents(files, index)

    def read(data: bytes) -> object:
        put(files, index, data)
        return _read_all(open_huggingface(PLACE, files=files))

    return Reader(read, [seed, json.dumps(json.loads(seed)).encode()], _ERRORS, same_tensors)


def safetensors_files() -> Reader:
    """Return the reader of a file of tensors; where only its header is given, the rest is sound."""
    files = _huggingface_files(10**6)
    whole = contents(files, PLACE / "model.safetensors")
    length = struct.unpack("<Q", whole[:8])[0]
    header, rest = whole[8 : 8 + length].rstrip(), whole[8 + length :]
    pieces = json.loads(header)
    told = {name: {"saved_offsets": [0, 0]} for name in pieces if name != "__metadata__"}
    pieces["__metadata__"] = {"DCP_SHARDING_INFO": json.dumps(told)}

    def read(data: bytes) -> object:
        if data[:1] == b"{":
            data = struct.pack("<Q", len(data)) + data + rest
        put(files, PLACE / "model.safetensors", data)
        return _read_all(open_huggingface(PLACE, files=files))

    seeds = [header, json.dumps(pieces).encode(), whole]
    return Reader(read, seeds, _ERRORS, same_tensors)


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


_INSTRUCTIONS: tuple[bytes, ...] = (
    *(bytes([code]) for code in b"(01N)]}aesutbR\x81\x85\x86\x87\x88\x89\x8f\x90\x93\x94Q."),
    *(b"K" + bytes([number]) for number in (0, 1, 2, 255)),
    *(b"q" + bytes([number]) for number in (0, 1, 7)),
    *(b"h" + bytes([number]) for number in (0, 1, 2, 7)),
    b"J\xff\xff\xff\xff",
    b"M\xff\xff",
    b"\x8a\x08" + b"\x7f" * 8,
    b"\x8a\x00",
    b"G" + struct.pack(">d", float("nan")),
    b"X\1\0\0\0a",
    b"X\1\0\0\0b",
    b"C\2ab",
    b"X\3\0\0\0\xed\xa0\x80",
    *(
        _text(name)
        for name in ("storage", "cpu", "os", "system", "true", "builtins", "eval", "1+1")
    ),
    *(f"c{name}\n".encode() for name in ("os\nsystem", "builtins\neval", "builtins\ngetattr")),
    b"ctorch\nload\n",
    b"cpathlib\nPath\n",
    b"ctorch\nSize\n",
    b"ctorch\nfloat32\n",
    b"ctorch\nFloatStorage\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ctorch._utils\n_rebuild_parameter\n",
    b"ccollections\nOrderedDict\n",
    b"c_codecs\nencode\n",
    b"c__builtin__\nset\n",
    b"ctorch.storage\nUntypedStorage\n",
    b"ios\nsystem\n",
    b"\x82\x01",
    b"\x80\x05",
    b"P1\n",
)
READERS: dict[str, Callable[[], Reader]] = {
    "DCP .metadata": metadata_files,
    "DCP programs of pickles": metadata_programs,
    "DCP folder, .metadata": dcp_folders,
    "DCP folder, .distcp": dcp_pieces,
    "torch.save pickle": saved_objects,
    "safetensors index": safetensors_indexes,
    "safetensors file": safetensors_files,
}
