"""Readers of data: text, rows, tables, tokens and tokenizers, each read from one file."""

from __future__ import annotations

import gzip
import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.fuzz_settings import OURS, put, room
from tests.fuzzing import Reader
from trainwright.integration.data import DataChoice, open_data, prepare_data
from trainwright.integration.data.learned import read_tokenizer, train_bpe
from trainwright.integration.data.sources.jsonl import json_lines
from trainwright.integration.data.sources.megatron import map_indexed
from trainwright.integration.data.sources.nanogpt import map_tokens
from trainwright.integration.data.sources.record import Document, Source
from trainwright.integration.data.sources.tables import parquet_files, saved_dataset
from trainwright.integration.data.sources.text import TextFiles

LINES = b'{"text": "a"}\n{"text": "b\\u00e9", "id": 3}\n{"text": "c"}\n\n{"text": "d"}\n'
TALK = {
    "messages": [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "yes"},
    ]
}
TALKS = (json.dumps(TALK) + "\n" + json.dumps(TALK)).encode()
DOCUMENTS = [[5, 6, 7, 1], [8, 1], [9, 10, 11, 12, 1], [13, 1]]


def records(source: Source) -> list[tuple[bool, str, Any]]:
    """Return all that a source holds."""
    found = []
    for held_out, record in source.split(0.3):
        said = b"".join(record.pieces) if isinstance(record, Document) else record.messages
        found.append((held_out, record.name, said))
    return found


def _tables() -> tuple[bytes, bytes]:
    table = pa.table({"id": range(9), "text": [f"text {k}" for k in range(9)]})
    parquet, stream = io.BytesIO(), io.BytesIO()
    pq.write_table(table, parquet, row_group_size=5)
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    return parquet.getvalue(), stream.getvalue()


def _saved(data: bytes) -> object:
    put("saved/state.json", b'{"_data_files": [{"filename": "d.arrow"}]}')
    return records(saved_dataset(put("saved/d.arrow", data).parent, "text"))


def _state() -> Reader:
    put("state/d.arrow", _tables()[1])
    seed = {"_data_files": [{"filename": "d.arrow"}], "_fingerprint": "0", "_split": "train"}

    def read(data: bytes) -> object:
        return records(saved_dataset(put("state/state.json", data).parent, "text"))

    return Reader(read, [json.dumps(seed).encode()], OURS)


def _index() -> bytes:
    sizes = [len(document) for document in DOCUMENTS]
    starts = [2 * sum(sizes[:number]) for number in range(len(sizes))]
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 4, 5)
    lists = (np.array(sizes, "<i4"), np.array(starts, "<i8"), np.arange(5, dtype="<i8"))
    return header + b"".join(each.tobytes() for each in lists)


def _megatron(data: bytes) -> object:
    put("m.bin", np.concatenate(DOCUMENTS).astype("<u2").tobytes())
    found = map_indexed(put("m.idx", data))
    return found.tokens.tolist(), found.ends.tolist()


def _tokenizer(data: bytes) -> object:
    found = read_tokenizer(put("tokenizer/tokenizer.json", data))
    (tokens,) = found.encode([b"hallo du"])
    sizes = found.sizes()
    return (
        found.vocabulary,
        found.end,
        found.start,
        tokens.tolist(),
        found.decode(tokens),
        None if sizes is None else int(sizes.sum()),
    )


def _vocabulary() -> bytes:
    return train_bpe([b"hallo welt wie geht es dir"] * 3, 264).content.encode()


def _tokenizer_config() -> Reader:
    put("named/tokenizer.json", _vocabulary())
    seeds = [b'{"eos_token": {"content": "<|im_end|>"}, "x": 1}', b'{"eos_token": "<|im_end|>"}']

    def read(data: bytes) -> object:
        return read_tokenizer(put("named/tokenizer_config.json", data).parent).end_name

    return Reader(read, seeds, OURS)


def _prepared(name: str) -> tuple[Path, Path]:
    """Return prepared data of the room, and its file of that name."""
    text = put("text.txt", b"hallo welt\nwie geht es dir\n" * 30)
    folder = room() / f"prepared-{name}"
    prepare_data(DataChoice(data=str(text), packing="documents"), folder)
    return folder, folder / name


def _opened(name: str) -> Reader:
    folder, path = _prepared(name)
    seed = path.read_bytes()

    def read(data: bytes) -> object:
        path.write_bytes(data)
        found = open_data(folder)
        return found.describe(), [int(np.sum(tokens.tokens)) for tokens in found.train]

    return Reader(read, [seed], OURS)


READERS: dict[str, Callable[[], Reader]] = {
    "data-text": lambda: Reader(
        lambda data: records(TextFiles(put("a.txt", data), whole_characters=True)),
        ["grün text\nmore\n".encode() * 5],
        OURS,
    ),
    "data-jsonl": lambda: Reader(
        lambda data: records(json_lines(put("a.jsonl", data), "text")), [LINES], OURS
    ),
    "data-jsonl-gz": lambda: Reader(
        lambda data: records(json_lines(put("a.jsonl.gz", data), "text")),
        [gzip.compress(LINES * 9)],
        OURS,
    ),
    "data-chat": lambda: Reader(
        lambda data: records(json_lines(put("c.jsonl", data), "messages", chat=True)),
        [TALKS],
        OURS,
    ),
    "data-parquet": lambda: Reader(
        lambda data: records(parquet_files(put("a.parquet", data), "text")), [_tables()[0]], OURS
    ),
    "data-arrow": lambda: Reader(_saved, [_tables()[1]], OURS),
    "data-arrow-state": _state,
    "data-nanogpt": lambda: Reader(
        lambda data: int(map_tokens(put("n.bin", data), "uint16").sum()),
        [np.arange(40, dtype="<u2").tobytes()],
        OURS,
    ),
    "data-megatron": lambda: Reader(_megatron, [_index()], OURS),
    "data-manifest": lambda: _opened("manifest.json"),
    "data-tokens": lambda: _opened("0.train.safetensors"),
    "tokenizer": lambda: Reader(_tokenizer, [_vocabulary()], OURS),
    "tokenizer-config": _tokenizer_config,
}
