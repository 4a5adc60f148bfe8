"""Files that others have written, damaged or made to harm: refused in words, at little cost."""

from __future__ import annotations

import gzip
import json
import math
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from trainwright.integration.config import RunConfig
from trainwright.integration.data import DataChoice, open_data, prepare_data
from trainwright.integration.data.choice import parse_paths
from trainwright.integration.data.learned import read_tokenizer, train_bpe
from trainwright.integration.data.sources.text import pieces_of
from trainwright.integration.errors import ConfigError, DataError, RunFolderError
from trainwright.integration.hugging_face import read_config
from trainwright.integration.outside_files import read_object, read_text
from trainwright.integration.report import page, read_run
from trainwright.integration.report.pipeline import ideal_of, lanes_of
from trainwright.integration.run_folder import RunFolder

DEEP = "[" * 9_000


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"\xff", "utf-8"),
        (b"[]", "must hold a JSON object, got list"),
        (DEEP.encode(), "nested too deep"),
        (b'{"a": 1' + b"0" * 5_000 + b"}", "integer string conversion"),
        (b" " * 101, "longer than 100 bytes"),
    ],
)
def test_what_is_no_object_is_refused_for_a_reason(
    tmp_path: Path, content: bytes, word: str
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=word):
        read_object(path, 100 if content.isspace() else 1 << 20)


def test_what_never_ends_is_not_read(tmp_path: Path) -> None:
    # A pipe that nobody writes to would be waited for.
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(ValueError, match="no regular file"):
            read_text(tmp_path / name)


def test_lines_of_metrics_that_no_run_wrote_are_passed_over(tmp_path: Path) -> None:
    lines = [
        json.dumps({"step": 1, "loss": 2.0}),
        DEEP,
        '{"step": "2", "loss": 1.0}',
        '{"step": 1' + "0" * 400 + ', "loss": 1.0}',
        '{"step": -1, "loss": 1.0}',
        '{"step": true, "loss": 1.0}',
        "null",
        json.dumps({"step": 3, "loss": "low"}),
        json.dumps({"step": 2, "loss": 1.0}),
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    folder = RunFolder(tmp_path)

    steps, losses = folder.losses()

    assert steps == [1, 2, 3]
    assert losses[:2] == [2.0, 1.0]
    assert losses[2] != losses[2]
    assert read_run(tmp_path).unreadable == {"metrics.jsonl": 6}
    assert "6 unreadable lines" in page(read_run(tmp_path))
    (tmp_path / "summary.json").write_text('{"bigram_loss": 1e308, "trigram_loss": 5e-324}')
    assert "6 unreadable lines" in page(read_run(tmp_path))
    folder.rewind(2)
    assert folder.losses() == ([1, 2], [2.0, 1.0])


def test_the_identity_of_a_run_is_read_or_refused(tmp_path: Path) -> None:
    for content in ("", "[]", "{}", DEEP, '{"run": "a"}', "\ud800"):
        (tmp_path / "run.json").write_bytes(content.encode("utf-8", "surrogatepass"))
        with pytest.raises(RunFolderError, match="cannot read whose run"):
            RunFolder(tmp_path).identity()


def test_messages_can_be_printed_whatever_they_name() -> None:
    error = ConfigError("half of \ud83d and " + "x" * 10**6)
    text = str(error)
    assert text.startswith(r"half of \ud83d and xxx")
    assert len(text.encode()) < 5_000


@pytest.mark.parametrize(
    "weight",
    ["1e999999999", "1e-999999999", "9" * 500, "1/0", "0", "-1", "nan", "inf", "1/3/4", "", "０"],
)
def test_a_weight_that_no_memory_holds_is_refused_like_any_other(weight: str) -> None:
    with pytest.raises(ConfigError, match=r"must be a positive number of a few digits|no weight"):
        parse_paths(f"a@1,b@{weight}")


def test_names_that_no_file_can_have_are_names_of_nothing(tmp_path: Path) -> None:
    long = "x" * 5_000
    for name in (long, "a\0b", "\ud800"):
        with pytest.raises((DataError, ConfigError)):
            prepare_data(DataChoice(data=name), tmp_path / "out")
        with pytest.raises(ConfigError, match="unknown model"):
            _ = RunConfig.of(model=name).model.shape
        with pytest.raises(ConfigError):
            read_tokenizer(Path(name))
    assert [str(each.path) for each in parse_paths(f"{long}@1,b@2")] == [long, "b"]


@pytest.mark.parametrize(
    ("choice", "word"),
    [
        ({"text_field": "body"}, "--text-field body names a field .* of format text has none"),
        ({"token_dtype": "uint32"}, "--token-dtype uint32 says what nanoGPT's files hold"),
        ({"text_field": "body", "format": "nanogpt"}, "of format nanogpt has none"),
    ],
)
def test_options_that_the_data_gives_no_effect_are_refused(
    tmp_path: Path, choice: dict[str, str], word: str
) -> None:
    (tmp_path / "text.txt").write_text("text\n" * 99)
    with pytest.raises(ConfigError, match=word):
        prepare_data(DataChoice(data=str(tmp_path / "text.txt"), **choice), tmp_path / "out")


def test_a_share_to_hold_out_of_tokens_that_were_cut_before_is_refused(prepared: Path) -> None:
    with pytest.raises(ConfigError, match=r"--held-out-share 0\.2 has no effect on folders"):
        prepare_data(DataChoice(data=str(prepared), held_out_share=0.2), prepared / "out")


@pytest.mark.parametrize("packed", [False, True])
def test_a_line_is_no_longer_than_memory_has_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    monkeypatch.setattr("trainwright.integration.data.sources.jsonl.LONGEST_LINE", 1_000)
    content = b'{"text": "short"}\n' + b'{"text": "' + b"x" * 2_000 + b'"}\n'
    path = tmp_path / f"d.jsonl{'.gz' if packed else ''}"
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(DataError, match="line 2 has more than 1000 bytes; write a document a"):
        prepare_data(DataChoice(data=str(path)), tmp_path / "out")


def test_a_text_without_line_ends_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainwright.integration.data.sources.files.BLOCK", 64)
    for text in ("ab " * 300, "\U0001f600" * 200, "x" * 900, "ü" * 300 + "\n" + "y " * 200):
        (tmp_path / "d.txt").write_text(text)
        pieces = list(pieces_of(tmp_path / "d.txt"))
        assert b"".join(pieces).decode() == text
        assert len(pieces) > 3
        assert max(map(len, pieces)) <= 4 * 64 or "\n" in text
        for piece in pieces:
            piece.decode()


def test_files_whose_names_are_no_text_are_read_like_others(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(9):
        (folder / os.fsdecode(b"\xff%d.txt" % number)).write_text("a text\n")
    data = prepare_data(DataChoice(data=str(folder)), tmp_path / "out")
    assert data.files == 9
    assert open_data(tmp_path / "out").files == 9


def _arrow(folder: Path) -> Path:
    folder.mkdir()
    table = pa.table({"text": [f"text {k}" for k in range(20)]})
    with (
        pa.OSFile(str(folder / "d.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as stream,
    ):
        stream.write_table(table)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "d.arrow"}]}')
    return folder


def test_offsets_that_lead_out_of_a_table_are_not_followed(tmp_path: Path) -> None:
    # The library that reads tables follows them, out of the process's memory.
    folder = _arrow(tmp_path / "saved")
    whole = (folder / "d.arrow").read_bytes()
    offsets = np.arange(0, 6 * 20, 6, dtype="<i4").tobytes()[:40]
    assert whole.count(offsets) == 1
    (folder / "d.arrow").write_bytes(whole.replace(offsets, b"\xff\xff\xff\x7f" * 10))
    with pytest.raises(DataError, match="as a table"):
        prepare_data(DataChoice(data=str(folder)), tmp_path / "out")

    (folder / "d.arrow").write_bytes(whole.replace(b"text 7", b"te\xfft 7"))
    with pytest.raises(DataError, match="as a table"):
        prepare_data(DataChoice(data=str(folder)), tmp_path / "out")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "x" * 5_000}]}))
    with pytest.raises(DataError, match="lacks the files"):
        prepare_data(DataChoice(data=str(folder)), tmp_path / "out")
    (folder / "state.json").write_text('{"_data_files": [{"filename": "/etc/passwd"}]}')
    with pytest.raises(DataError, match="lists files of other folders, such as passwd"):
        prepare_data(DataChoice(data=str(folder)), tmp_path / "out")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "text.txt").write_text("hallo welt, wie geht es dir\n" * 40)
    prepare_data(DataChoice(data=str(folder / "text.txt"), tokenizer="bpe:262"), folder / "data")
    return folder / "data"


@pytest.mark.parametrize(
    "change",
    [
        {"weight": "1/0"},
        {"weight": 1},
        {"weight": "9" * 5_000},
        {"role": "test"},
        {"place": 3},
        {"parts": ["train", "train"]},
        {"parts": 7},
        {"dtype": "O"},
        {"dtype": "<f4"},
        {"dtype": "<u2", "tokens": 2**62},
        {"dtype": "<u2", "place": "manifest.json", "tokens": 5, "cut": 6},
        {"files": "many"},
        {"skipped": [1]},
        {"place": "."},
        {"place": "\ud800"},
    ],
    ids=str,
)
def test_a_manifest_that_lies_of_its_sources_is_refused(
    prepared: Path, change: dict[str, object]
) -> None:
    path = prepared / "manifest.json"
    before = path.read_text()
    values = json.loads(before)
    values["entries"][0] |= change
    try:
        path.write_text(json.dumps(values))
        with pytest.raises(DataError):
            open_data(prepared)
    finally:
        path.write_text(before)
    assert len(open_data(prepared).train) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"checksum": ""},
        {"checksum": "zz"},
        {"tokenizer": "bpe:300"},
        {"tokenizer": "/etc/passwd"},
        {"packing": "tight"},
        {"end_token": 3},
        {"entries": []},
        {"more": 1},
        {"key": [[]]},
    ],
    ids=str,
)
def test_a_manifest_that_lies_of_its_data_is_refused(
    prepared: Path, change: dict[str, object]
) -> None:
    path = prepared / "manifest.json"
    before = path.read_text()
    try:
        path.write_text(json.dumps(json.loads(before) | change))
        with pytest.raises(DataError):
            open_data(prepared)
    finally:
        path.write_text(before)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"data_offsets": [0,', b'"data_offsets": [[],'),
        (b'"data_offsets": [0,', b'"data_offsets": [-8,'),
        (b'"data_offsets": [0,', b'"data_offsets": [0.0,'),
        (b'"dtype": "U16"', b'"dtype": "I64"'),
        (b'"dtype": "U16"', b'"dtype": ["U"]'),
        (b'{"__metadata__"', b'{"tokens": 1   '),
        (b'{"__metadata__"', b"[" * 15),
    ],
)
def test_a_header_of_tokens_that_lies_is_refused(prepared: Path, old: bytes, new: bytes) -> None:
    path = prepared / "0.train.safetensors"
    before = path.read_bytes()
    assert before.count(old) >= 1
    head = before[:1024].replace(old, new, 1)
    try:
        path.write_bytes((head.rstrip(b" ").ljust(1024))[:1024] + before[1024:])
        with pytest.raises(DataError):
            open_data(prepared)
    finally:
        path.write_bytes(before)


def test_vocabularies_that_no_model_has_rows_for_are_refused(tmp_path: Path) -> None:
    described = json.loads(train_bpe([b"hallo welt"] * 3, 262).content)
    path = tmp_path / "tokenizer.json"
    described["model"]["vocab"]["hallo"] = 2**32 - 2
    path.write_text(json.dumps(described))
    with pytest.raises(ConfigError, match="token of number 4294967294"):
        read_tokenizer(path)
    described["model"]["vocab"]["hallo"] = 5
    path.write_text(json.dumps(described))
    with pytest.raises(ConfigError, match="has two tokens of number 5"):
        read_tokenizer(path)
    del described["model"]["vocab"]["hallo"]
    path.write_text(json.dumps(described))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "\\ud800"}')
    with pytest.raises(ConfigError, match=r"has no token \\ud800"):
        read_tokenizer(tmp_path)


def test_texts_that_a_vocabulary_has_no_words_for_are_refused(tmp_path: Path) -> None:
    words = {
        "model": {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "[UNK]"},
        "added_tokens": [],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    (tmp_path / "text.txt").write_text("words\n" * 9)
    choice = DataChoice(data=str(tmp_path / "text.txt"), tokenizer=str(tmp_path))
    with pytest.raises(ConfigError, match=r"tokenizer.json cannot encode the text: .*UNK"):
        prepare_data(choice, tmp_path / "out")


def test_a_configuration_of_a_model_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": ' + DEEP)
    with pytest.raises(ConfigError, match="nested too deep"):
        read_config(tmp_path)
    sizes = {"vocab_size": 6, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4}
    sizes |= {"moe_intermediate_size": 4, "num_experts_per_tok": 2, "num_experts": 4}
    values = {"model_type": "qwen3_moe", **sizes, "decoder_sparse_step": 0}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="modulo by zero"):
        read_config(tmp_path)


def test_times_without_end_are_not_drawn() -> None:
    for start, stop in ((-math.inf, 1.0), (0.0, math.inf), (0.0, 1e300), (math.nan, 1.0)):
        assert lanes_of([[["F", 0, 0, start, stop]]]) == ()


def test_a_schedule_of_more_microbatches_than_were_measured_is_not_built() -> None:
    lanes = lanes_of([[["F", 0, 0, 0.0, 1.0], ["B", 0, 0, 1.0, 3.0]]])
    about = {"schedule": "1f1b", "pipeline_ranks": 1, "microbatches": 1, "chunks": None}
    assert ideal_of(about, lanes)
    for size in (10**9, 3, 0, -1, True, 1.0, "1", None):
        assert ideal_of({**about, "microbatches": size}, lanes) == ()
