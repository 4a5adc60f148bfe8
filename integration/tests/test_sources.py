"""Formats of data: each read in order, and each damaged file named."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable
from pathlib import Path

import attrs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainwright.integration.data import DataChoice, Dataset, prepare_data
from trainwright.integration.data.choice import format_of
from trainwright.integration.data.sources.megatron import map_indexed
from trainwright.integration.errors import ConfigError, DataError
from trainwright.integration.measured_rows import _with_what_has_effect

TEXTS = [f"text number {k}, grün" for k in range(40)]


def _jsonl(path: Path, rows: list[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def _parquet(path: Path, texts: list[str], column: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": range(len(texts)), column: texts}), path, row_group_size=7)
    return path


def _saved_dataset(folder: Path, texts: list[str]) -> Path:
    # What save_to_disk of `datasets` writes: Arrow streams, and a state that lists them.
    folder.mkdir(parents=True)
    files = []
    for number in range(2):
        name = f"data-{number:05d}-of-00002.arrow"
        table = pa.table({"text": texts[number::2]})
        with (
            pa.OSFile(str(folder / name), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as s,
        ):
            s.write_table(table, max_chunksize=3)
        files.append({"filename": name})
    (folder / "state.json").write_text(
        json.dumps({"_data_files": files, "_fingerprint": "0", "_split": "train"})
    )
    (folder / "dataset_info.json").write_text("{}")
    return folder


def _documents(data: Dataset) -> tuple[list[str], list[str]]:
    found = []
    for tokens in (data.train[0], data.held_out[0]):
        texts = bytes(tokens.tokens).decode().split("\0")
        assert texts.pop() == ""
        assert tokens.ends is not None
        assert len(tokens.ends) == len(texts)
        found.append(texts)
    return found[0], found[1]


SOURCES: dict[str, Callable[[Path], Path]] = {
    "jsonl": lambda at: _jsonl(at / "d.jsonl", [{"id": 1, "text": t} for t in TEXTS]),
    "jsonl.gz": lambda at: _jsonl(at / "d.jsonl.gz", [{"text": t} for t in TEXTS]),
    "parquet": lambda at: _parquet(at / "d.parquet", TEXTS),
    "datasets": lambda at: _saved_dataset(at / "d", TEXTS),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_rows_are_documents_in_order_of_which_a_share_is_held_out(
    kind: str, tmp_path: Path
) -> None:
    path = SOURCES[kind](tmp_path)

    train, held_out = _documents(prepare_data(DataChoice(data=str(path)), tmp_path / "out"))

    ordered = TEXTS[0::2] + TEXTS[1::2] if kind == "datasets" else TEXTS
    assert train == [text for text in ordered if text in train]
    assert held_out == [text for text in ordered if text in held_out]
    assert sorted(train + held_out) == sorted(TEXTS)
    assert 1 <= len(held_out) <= 8


def test_a_folder_of_shards_is_read_in_order_of_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    for number in range(4):
        _parquet(folder / f"part-{number}.parquet", TEXTS[10 * number : 10 * number + 10])
    (folder / "README.md").write_text("a data set")
    shuffled = tmp_path / "lines"
    for number in (2, 0, 3, 1):
        rows = [{"body": t} for t in TEXTS[10 * number : 10 * number + 10]]
        _jsonl(shuffled / f"{number}.jsonl", rows)

    first = prepare_data(DataChoice(data=str(folder)), tmp_path / "a")
    second = prepare_data(DataChoice(data=str(shuffled), text_field="body"), tmp_path / "b")

    for data in (first, second):
        train, held_out = _documents(data)
        assert train == [text for text in TEXTS if text in train]
        assert len(train) + len(held_out) == len(TEXTS)
        assert data.files == 4


def test_formats_go_by_names_and_a_folder_of_other_files_is_text(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.parquet", "c.bin", "d.txt", "e.bin", "e.idx", "f/state.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    kinds = {
        "a.jsonl": "jsonl",
        "b.parquet": "parquet",
        "c.bin": "nanogpt",
        "d.txt": "text",
        "e.bin": "megatron",
        "e.idx": "megatron",
        "e": "megatron",
        "f": "datasets",
        ".": "text",
    }
    assert {name: format_of(tmp_path / name) for name in kinds} == kinds
    assert format_of(tmp_path / "a.jsonl", "text") == "text"


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b'{"text": "a"}\n{"text": 3}\n', "line 2: the text must be a string"),
        (b'{"text": "a"}\n{"body": "b"}\n', "line 2 has no field 'text'; it has 'body'"),
        (b'{"text": "a"}\n["b"]\n', "line 2 must be a JSON object"),
        (b'{"text": "a"}\n{"text": ', "line 2 is not JSON"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', "line 2 is not JSON"),
        (b'{"text": "\\ud800"}\n{"text": "b"}\n', "half a character"),
        (b"\n\n", "holds no document"),
        (b'{"text": "a"}\n', "holds one document"),
        (b"[" * 100_000 + b"\n", "line 1 is not JSON"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=word):
        prepare_data(DataChoice(data=str(path)), tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_tables_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    whole = _parquet(tmp_path / "d.parquet", TEXTS)
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(whole.read_bytes()[:-9])
    zipped = _jsonl(tmp_path / "d.jsonl.gz", [{"text": t} for t in TEXTS])
    zipped.write_bytes(zipped.read_bytes()[:-20])
    saved = _saved_dataset(tmp_path / "saved", TEXTS)
    (saved / "data-00001-of-00002.arrow").unlink()
    torn = _saved_dataset(tmp_path / "torn", TEXTS)
    stream = torn / "data-00000-of-00002.arrow"
    stream.write_bytes(stream.read_bytes()[: stream.stat().st_size // 2])
    several = tmp_path / "several"
    several.mkdir()
    (several / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for path, field, word in (
        (cut, "text", "as a table"),
        (whole, "body", "no column 'body'; it has 'id', 'text'"),
        (whole, "id", "row 0: the text must be a string"),
        (zipped, "text", "not whole"),
        (saved, "text", "lacks the files"),
        (torn, "text", "as a table"),
        (several, "text", "splits"),
        (tmp_path / "missing.parquet", "text", "does not exist"),
    ):
        with pytest.raises(DataError, match=word):
            prepare_data(DataChoice(data=str(path), text_field=field), tmp_path / "out")


def test_token_files_without_a_header_are_mapped_where_they_are(tmp_path: Path) -> None:
    for dtype in ("uint16", "uint32"):
        tokens = np.arange(1000).astype(dtype)
        path = tmp_path / f"{dtype}.bin"
        path.write_bytes(tokens.astype(f"<u{tokens.itemsize}").tobytes())
        choice = DataChoice(data=str(path), tokenizer="ids:1000", token_dtype=dtype)

        data = prepare_data(choice, tmp_path / dtype)

        assert np.array_equal(data.train[0].tokens, tokens[:950])
        assert np.array_equal(data.held_out[0].tokens, tokens[950:])
        # No token is written anew.
        written = sorted(p.name for p in (tmp_path / dtype).iterdir())
        assert written == ["glimpse.txt", "manifest.json"]


def test_token_files_that_cannot_be_are_named(tmp_path: Path) -> None:
    path = tmp_path / "d.bin"
    for content, tokenizer, word in (
        (b"", "ids:9", "0 bytes"),
        (b"\1\0\2", "ids:9", "no whole number of tokens"),
        (struct.pack("<ii", 20240520, 1) * 9, "ids:99999", "has a header"),
        (struct.pack("<20H", *range(20)), "ids:19", "token 19 at place 0.*vocabulary of 19"),
        (struct.pack("<20H", *range(300, 320)), None, "vocabulary of 256"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=word.replace(" at place 0", " at place")):
            prepare_data(DataChoice(data=str(path), tokenizer=tokenizer), tmp_path / "out")


def test_documents_of_a_stream_of_tokens_end_with_the_end_token(tmp_path: Path) -> None:
    path = tmp_path / "d.bin"
    path.write_bytes(np.array([5, 6, 0, 7, 0, 8, 9, 4, 3, 0, 1, 2, 0] * 9, "<u2").tobytes())

    # Zero is the end token of bytes.
    data = prepare_data(DataChoice(data=str(path), packing="documents"), tmp_path / "out")

    row = data.train[0].rows(8, "documents").sequence(0)
    assert row.tokens.tolist() == [5, 6, 0, 7, 0, 8, 9, 4, 3]
    assert row.documents is not None
    assert row.documents.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    with pytest.raises(ConfigError, match="--packing whole needs the ends"):
        data.train[0].rows(8, "whole")


def _indexed(
    prefix: Path,
    documents: list[list[int]],
    *,
    code: int = 8,
    header: bytes | None = None,
    lengths: list[int] | None = None,
    pointers: list[int] | None = None,
    boundaries: list[int] | None = None,
    modes: bytes = b"",
) -> Path:
    dtype = {1: "u1", 4: "<i4", 5: "<i8", 8: "<u2"}.get(code, "<u2")
    width = np.dtype(dtype).itemsize
    sizes = [len(document) for document in documents]
    lengths = sizes if lengths is None else lengths
    starts = [width * sum(sizes[:k]) for k in range(len(sizes))]
    pointers = starts if pointers is None else pointers
    boundaries = list(range(len(sizes) + 1)) if boundaries is None else boundaries
    if header is None:
        header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(boundaries))
    lists = (np.array(lengths, "<i4"), np.array(pointers, "<i8"), np.array(boundaries, "<i8"))
    Path(f"{prefix}.idx").write_bytes(header + b"".join(x.tobytes() for x in lists) + modes)
    flat = np.array([token for document in documents for token in document], dtype)
    Path(f"{prefix}.bin").write_bytes(flat.tobytes())
    return prefix


DOCUMENTS = [[5, 6, 7, 1], [8, 1], [9, 10, 11, 12, 1], [13, 1]] * 10


@pytest.mark.parametrize("code", [1, 4, 5, 8])
def test_indexed_tokens_are_mapped_with_the_ends_of_their_documents(
    tmp_path: Path, code: int
) -> None:
    prefix = _indexed(tmp_path / "d", DOCUMENTS, code=code)

    found = map_indexed(Path(f"{prefix}.bin"))
    data = prepare_data(DataChoice(data=str(prefix), tokenizer="ids:14"), tmp_path / "out")

    flat = [token for document in DOCUMENTS for token in document]
    assert found.tokens.tolist() == flat
    assert found.ends.tolist() == np.cumsum([len(d) for d in DOCUMENTS]).tolist()
    # Of forty documents the last two are held out.
    assert data.held_out[0].tokens.tolist() == [9, 10, 11, 12, 1, 13, 1]
    assert data.held_out[0].ends is not None
    assert data.held_out[0].ends.tolist() == [5, 7]
    assert len(data.train[0]) == len(flat) - 7
    row = data.train[0].rows(8, "whole").sequence(0)
    assert row.tokens.tolist() == [5, 6, 7, 1, 8, 1, 0, 0, 0]


def test_sequences_of_an_indexed_document_belong_together(tmp_path: Path) -> None:
    prefix = _indexed(tmp_path / "d", DOCUMENTS[:4], boundaries=[0, 2, 2, 4], modes=b"\0" * 4)
    assert map_indexed(prefix).ends.tolist() == [6, 6, 13]


MAGIC = b"MMIDIDX\0\0"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"header": b"MMIDIDX"}, "truncated, or its header|fewer than|begins with"),
        ({"header": b"TNTIDX\0\0\0" + struct.pack("<QBQQ", 1, 8, 40, 41)}, "begins with"),
        ({"header": MAGIC + struct.pack("<QBQQ", 2, 8, 40, 41)}, "version 2"),
        ({"code": 7}, "of kind 7"),
        ({"code": 99}, "of kind 99"),
        ({"header": MAGIC + struct.pack("<QBQQ", 1, 8, 41, 41)}, "truncated, or its header"),
        ({"header": MAGIC + struct.pack("<QBQQ", 1, 8, 2**62, 2**62)}, "truncated, or its header"),
        ({"lengths": [-4] + [2] * 39}, "a sequence of -4 tokens"),
        ({"lengths": [9] * 40}, "sequence 1 at byte 8"),
        ({"pointers": [0] * 40}, "sequence 1 at byte 0"),
        ({"boundaries": [1, *range(2, 42)]}, "rise from 0"),
        ({"boundaries": [0, 3, 2, 40]}, "rise from 0"),
        ({"boundaries": [0, 39]}, "rise from 0"),
        ({"boundaries": []}, "rise from 0"),
        ({"boundaries": [0, 2**40]}, "rise from 0"),
    ],
)
def test_an_index_that_lies_is_refused(
    tmp_path: Path, changes: dict[str, object], word: str
) -> None:
    prefix = _indexed(tmp_path / "d", DOCUMENTS, **changes)
    with pytest.raises(DataError, match=word):
        map_indexed(prefix)


def test_truncated_and_missing_files_of_an_index_are_named(tmp_path: Path) -> None:
    prefix = _indexed(tmp_path / "d", DOCUMENTS)
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    whole, tokens = index.read_bytes(), data.read_bytes()
    for length in (0, 8, 34, 35, len(whole) - 1):
        index.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"bytes|begins"):
            map_indexed(prefix)
    index.write_bytes(whole)
    for content in (tokens[:-1], tokens[:-2], tokens + b"\0\0", b""):
        data.write_bytes(content)
        with pytest.raises(DataError, match="one of them is truncated"):
            map_indexed(prefix)
    data.unlink()
    with pytest.raises(DataError, match="cannot read the indexed tokens"):
        map_indexed(prefix)


def test_other_data_is_measured_without_what_was_said_of_fields_and_files_that_it_lacks(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.jsonl").write_text('{"body": "text"}\n')
    said = DataChoice(data=str(tmp_path / "a.txt"), text_field="body", token_dtype="uint32")

    text = _with_what_has_effect(said)
    rows = _with_what_has_effect(attrs.evolve(said, data=str(tmp_path / "b.jsonl")))

    assert (text.text_field, text.token_dtype) == ("text", "uint16")
    assert (rows.text_field, rows.token_dtype) == ("body", "uint16")
