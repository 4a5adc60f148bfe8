"""Tokenizers, conversations, and the files of tokens that ranks map."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from trainwright.integration.data import (
    ByteTokenizer,
    DataChoice,
    Sequence,
    known_vocabulary,
    labels_of,
    open_data,
    preparation,
    prepare_data,
    read_corpus,
)
from trainwright.integration.data.encoding import encoded
from trainwright.integration.data.learned import LearnedTokenizer, read_tokenizer, train_bpe
from trainwright.integration.data.preparation import left_there
from trainwright.integration.data.sources.record import Conversation, Document, Message
from trainwright.integration.errors import ConfigError, DataError
from trainwright.integration.evaluation import TokenLosses, bits_a_byte, bytes_of

WORDS = ["dieser grüne Satz", "kehrt oft", "wieder,", "mit Zahlen", "wie 17", "oder 2026"]
TEXTS = [" ".join(WORDS[(k + j) % 6] for j in range(5)) + f" {k}\n" for k in range(60)]


def _text_folder(path: Path, texts: list[str] = TEXTS) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (path / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    return path


def _prepared(tmp_path: Path, **choice: Any) -> Any:
    return prepare_data(DataChoice(**choice), tmp_path / "prepared")


def test_bytes_of_text_are_those_of_a_corpus_in_memory(tmp_path: Path) -> None:
    folder = _text_folder(tmp_path / "texts")
    (folder / "binary").write_bytes(b"\0\1")
    corpus = read_corpus(folder)

    data = _prepared(tmp_path, data=str(folder))

    assert np.array_equal(data.train[0].tokens, corpus.train)
    assert np.array_equal(data.held_out[0].tokens, corpus.held_out)
    # A run begun with another version goes on with the same data.
    assert data.checksum == corpus.checksum
    assert (data.files, data.skipped) == (60, ("binary",))
    assert data.describe() == corpus.describe()


@pytest.mark.parametrize("packing", ["stream", "documents", "whole"])
def test_the_same_tokens_come_from_the_files_as_from_memory(tmp_path: Path, packing: str) -> None:
    folder = _text_folder(tmp_path / "texts")
    data = _prepared(tmp_path, data=str(folder), packing=packing)
    opened = open_data(tmp_path / "prepared")
    corpus = read_corpus(folder).with_documents(packing)

    for other in (opened, corpus):
        for position in (0, 5, 70):
            one, two = (d.samples(16, seed=3).sample(position) for d in (data, other))
            assert np.array_equal(one.tokens, two.tokens)
            assert (one.documents is None) == (packing == "stream")
            if one.documents is not None:
                assert two.documents is not None
                assert np.array_equal(one.documents, two.documents)


def test_a_vocabulary_learnt_of_the_training_documents_says_every_text(tmp_path: Path) -> None:
    folder = _text_folder(tmp_path / "texts")
    choice = DataChoice(data=str(folder), tokenizer="bpe:300")
    assert known_vocabulary(choice) == 300

    data = prepare_data(choice, tmp_path / "prepared")

    assert data.tokenizer.vocabulary == 300
    assert data.train[0].tokens.dtype == np.uint16
    end = data.tokenizer.end
    for tokens in (data.train[0], data.held_out[0]):
        assert tokens.ends is not None
        starts = [0, *tokens.ends[:-1].tolist()]
        for start, stop in zip(starts, tokens.ends.tolist(), strict=True):
            assert tokens.tokens[stop - 1] == end
            assert data.tokenizer.decode(tokens.tokens[start : stop - 1]) in TEXTS
    # It is kept beside the tokens, as a file that the library opens.
    kept = Tokenizer.from_file(str(tmp_path / "prepared" / "tokenizer.json"))
    assert kept.get_vocab_size() == 300
    assert read_tokenizer(tmp_path / "prepared").describe() == data.tokenizer.describe()


def test_learning_twice_gives_the_same_whatever_pieces_the_texts_come_in() -> None:
    texts = [text.encode() for text in TEXTS]
    pieces = [piece for text in texts for piece in (text[:0], text)]
    assert train_bpe(texts, 320).content == train_bpe(pieces, 320).content
    with pytest.raises(DataError, match=r"bpe:5000.*bpe:\d+ works"):
        train_bpe(texts, 5000)


def test_names_of_special_tokens_in_a_text_are_text() -> None:
    tokenizer = train_bpe([text.encode() for text in TEXTS], 300)
    text = b"a <|endoftext|> and an <|im_end|>"

    (tokens,) = tokenizer.encode([text])

    special = {tokenizer.end, tokenizer.special("<|im_start|>"), tokenizer.special("<|im_end|>")}
    assert None not in special
    assert not special & set(tokens.tolist())
    assert tokenizer.decode(tokens) == text.decode()


def test_sizes_are_the_bytes_of_each_token() -> None:
    tokenizer = train_bpe([text.encode() for text in TEXTS], 300)
    sizes = tokenizer.sizes()
    assert sizes is not None
    for text in ("grüne Sätze – mit 17 €", TEXTS[3]):
        (tokens,) = tokenizer.encode([text.encode()])
        assert sizes[tokens].sum() == len(text.encode())
    assert sizes[tokenizer.end] == 0

    labels = torch.tensor([[*tokens.tolist(), -100]])
    losses = TokenLosses(1.5 * len(tokens), len(tokens))
    found = bits_a_byte(losses, bytes_of(labels, tokenizer))
    right = 1.5 * len(tokens) / np.log(2) / len(text.encode())
    assert found is not None
    assert abs(found - right) < 1e-12


def _vocabulary(special: list[str]) -> Tokenizer:
    words = ["<unk>", "a", "b", *special]
    built = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    built.add_special_tokens(special)
    return built


def test_a_given_tokenizer_says_how_documents_begin_and_end(tmp_path: Path) -> None:
    built = _vocabulary(["<s>", "</s>", "<stop>"])
    built.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 3), ("</s>", 4)]
    )
    built.save(str(tmp_path / "tokenizer.json"))
    rows = [(False, Document("d", (b"a b", b" a")))]

    def tokens_of(tokenizer: Any) -> list[int]:
        return [int(token) for each in encoded(rows, tokenizer) for token in each.tokens]

    assert tokens_of(read_tokenizer(tmp_path / "tokenizer.json")) == [3, 1, 2, 1, 4]
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<stop>"}}')
    assert tokens_of(read_tokenizer(tmp_path))[-1] == 5
    assert tokens_of(read_tokenizer(tmp_path, "</s>"))[-1] == 4
    assert read_tokenizer(tmp_path).sizes() is None
    with pytest.raises(ConfigError, match="no token <end> to stand behind documents"):
        read_tokenizer(tmp_path, "<end>")
    for content, word in (("{", "is no tokenizer"), ("[]", "is no tokenizer")):
        with pytest.raises(ConfigError, match=word):
            LearnedTokenizer(content)
    with pytest.raises(ConfigError, match="cannot read"):
        read_tokenizer(tmp_path / "missing")


@pytest.mark.parametrize(
    "spec", ["bpe:", "bpe:-3", "bpe:12", "bpe:1e4", "ids:0", "ids:x", f"ids:{2**31}", "byte"]
)
def test_a_tokenizer_that_cannot_be_is_refused_with_the_way_out(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"takes a whole number|give bytes, bpe:N"):
        known_vocabulary(DataChoice(tokenizer=spec))


TALK = Conversation(
    "talk",
    (
        Message("system", "be brief"),
        Message("user", "what is <|im_end|>?"),
        Message("assistant", "an end"),
        Message("user", "and 2?"),
        Message("assistant", "two"),
    ),
)


@pytest.mark.parametrize("learned", [False, True])
def test_of_conversations_answers_and_their_ends_are_learnt_and_nothing_else(learned: bool) -> None:
    tokenizer: Any = ByteTokenizer()
    if learned:
        tokenizer = train_bpe([text.encode() for text in TEXTS], 300)
    parts = list(encoded([(False, TALK)], tokenizer))
    tokens = np.concatenate([each.tokens for each in parts])
    counts = np.concatenate([np.full(len(each.tokens), each.part.counts) for each in parts])

    labels = labels_of(Sequence(tokens, counts=counts))

    learnt = labels[labels >= 0]
    assert tokenizer.decode(learnt) == "an end<|im_end|>two<|im_end|>"
    if learned:
        # The end is one token of its own, and the one that the user wrote is none.
        end = tokenizer.special("<|im_end|>")
        assert (learnt == end).sum() == 2
        assert (tokens == end).sum() == 5
    assert tokens[-1] == tokenizer.end


def test_conversations_are_not_spelt_out_in_a_vocabulary_without_their_marks(
    tmp_path: Path,
) -> None:
    _vocabulary(["</s>", "<|im_start|>"]).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"no token <\|im_end\|>.*templates are not available"):
        list(encoded([(False, TALK)], read_tokenizer(tmp_path)))


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ("hello", "must be a list"),
        ([], "must be a list"),
        ([{"role": "user", "content": "a"}], "no message is the assistant's"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}], "has tool_calls"),
        ([{"role": "assistant"}], "must have role and content"),
        ([{"role": "bot", "content": "a"}], "role must be one of system, user"),
        ([{"role": "assistant", "content": ["a"]}], "content a string"),
    ],
)
def test_messages_that_cannot_be_are_named(tmp_path: Path, messages: Any, word: str) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(DataError, match=word):
        _prepared(tmp_path, data=str(path), chat=True)


def test_conversations_keep_what_counts_in_their_file(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "answer"}]
    path = tmp_path / "talks.jsonl"
    path.write_text((json.dumps({"messages": talk}) + "\n") * 30)

    data = _prepared(tmp_path, data=str(path), chat=True, packing="whole")

    row = data.samples(140, seed=0).sample(0)
    labels = labels_of(row)
    # Two conversations fit whole; padding is the end token, which is not learnt there.
    assert bytes(labels[labels >= 0].astype(np.uint8)) == b"answer<|im_end|>" * 2
    with pytest.raises(DataError, match="--chat reads rows with messages"):
        _prepared(tmp_path, data=str(_text_folder(tmp_path / "texts")), chat=True)


def test_token_files_are_opened_by_the_safetensors_library(tmp_path: Path) -> None:
    data = _prepared(tmp_path, data=str(_text_folder(tmp_path / "texts")), tokenizer="bpe:300")

    found = load_file(tmp_path / "prepared" / "0.train.safetensors")

    assert np.array_equal(found["tokens"], data.train[0].tokens)
    assert np.array_equal(found["ends"], data.train[0].ends)
    # Places are searched in the mapped file, which must not copy them each time.
    assert data.train[0].ends.flags.aligned
    assert isinstance(data.train[0].tokens, np.memmap)


def test_what_was_left_is_taken_only_if_it_is_of_the_same_and_whole(tmp_path: Path) -> None:
    folder, out = _text_folder(tmp_path / "texts"), tmp_path / "prepared"
    choice = DataChoice(data=str(folder), tokenizer="bpe:300")
    data = prepare_data(choice, out)
    left = left_there(choice, out)
    assert left is not None
    assert left.checksum == data.checksum

    # The same content under another path, and the same path with other choices.
    moved = folder.rename(tmp_path / "moved")
    assert left_there(DataChoice(data=str(moved), tokenizer="bpe:300"), out) is not None
    assert left_there(DataChoice(data=str(moved), tokenizer="bpe:301"), out) is None
    assert left_there(DataChoice(data=str(moved), tokenizer="bpe:300", chat=False), out) is not None
    (moved / "000.txt").write_text("another text\n")
    assert left_there(DataChoice(data=str(moved), tokenizer="bpe:300"), out) is None
    (moved / "000.txt").write_text(TEXTS[0])

    file = out / "0.train.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-8] + b"\1" + whole[-7:])
    assert left_there(DataChoice(data=str(moved), tokenizer="bpe:300"), out) is None
    file.write_bytes(whole[:-1])
    assert left_there(DataChoice(data=str(moved), tokenizer="bpe:300"), out) is None
    with pytest.raises(DataError, match="truncated"):
        open_data(out)
    file.unlink()
    with pytest.raises(DataError, match="cannot read the token file"):
        open_data(out)


def test_data_that_looks_as_it_did_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = _text_folder(tmp_path / "texts"), tmp_path / "prepared"
    choice = DataChoice(data=str(folder), tokenizer="bpe:300")
    right = prepare_data(choice, out).checksum
    reads: list[str] = []
    for module, name in (("finding", "fingerprint_of"), ("preparation", "checksum_of")):
        place = f"trainwright.integration.data.{module}.{name}"
        monkeypatch.setattr(place, lambda *_, name=name: reads.append(name) or "")
    monkeypatch.setattr(
        "trainwright.integration.data.sources.text.is_text", lambda path: not reads.append("text")
    )

    left = left_there(choice, out)

    assert left is not None
    assert left.checksum == right
    assert reads == []
    # What has been touched is read, whether it has changed or not.
    os.utime(folder / "000.txt", (1, 1))
    left_there(choice, out)
    assert "text" in reads
    reads.clear()
    monkeypatch.undo()
    assert left_there(choice, out) is not None
    kept = out / "0.train.safetensors"
    content = kept.read_bytes()
    kept.write_bytes(content[:1500] + bytes([content[1500] ^ 1]) + content[1501:])
    assert left_there(choice, out) is None


def test_damaged_tokens_of_a_folder_are_not_trained_on(tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    prepare_data(DataChoice(data=str(_text_folder(tmp_path / "texts"))), folder)
    prepare_data(DataChoice(data=str(folder)), tmp_path / "sound")
    kept = folder / "0.train.safetensors"
    content = kept.read_bytes()
    kept.write_bytes(content[:1500] + b"x" + content[1501:])
    with pytest.raises(DataError, match="are damaged; tokenise the data anew"):
        prepare_data(DataChoice(data=str(folder)), tmp_path / "out")


def test_what_is_held_out_of_a_few_sources_goes_by_their_weights(tmp_path: Path) -> None:
    for name, share in (("a", 0.0), ("b", 0.1), ("c", 0.1)):
        text = DataChoice(data=str(_text_folder(tmp_path / f"texts-{name}")), held_out_share=share)
        prepare_data(text, tmp_path / name)
    mixed = ",".join(
        f"{tmp_path / name}@{weight}" for name, weight in zip("abc", "213", strict=True)
    )

    data = prepare_data(DataChoice(data=mixed), tmp_path / "mixed")
    alone = prepare_data(
        DataChoice(data=mixed, held_out=str(tmp_path / "a")), tmp_path / "held-out"
    )

    assert len(data.train) == 3
    assert len(data.held_out) == 2
    assert len(data.held_out_rows(8, 8).tokens_NS) == 8
    # What is held out by name is all that is.
    assert [tokens.what for tokens in alone.held_out] == ["held-out part"]
    assert len(alone.held_out[0]) == len(data.train[0])


def test_an_interrupted_preparation_leaves_no_manifest_and_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = _text_folder(tmp_path / "texts"), tmp_path / "prepared"
    choice = DataChoice(data=str(folder))
    right = prepare_data(choice, tmp_path / "right").checksum

    def fail(*_: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("trainwright.integration.data.token_file.os.fsync", fail)
        with pytest.raises(DataError, match="no space left"):
            prepare_data(choice, out)
    assert sorted(path.name for path in out.iterdir()) == []
    assert prepare_data(choice, out).checksum == right


def test_preparing_keeps_no_more_of_the_corpus_than_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainwright.integration.data.sources.files.BLOCK", 1 << 12)
    monkeypatch.setattr("trainwright.integration.data.encoding.BATCH_BYTES", 1 << 13)
    path = tmp_path / "long.txt"
    lines = "".join(f"{TEXTS[k % 60].strip()} {k}\n" for k in range(2000))
    path.write_text(lines, encoding="utf-8")
    largest = 0
    plain = ByteTokenizer.encode

    def watched(self: ByteTokenizer, texts: Any) -> Any:
        nonlocal largest
        largest = max(largest, sum(map(len, texts)))
        return plain(self, texts)

    monkeypatch.setattr(ByteTokenizer, "encode", watched)
    data = _prepared(tmp_path, data=str(path))

    assert (
        bytes(data.train[0].tokens[:-1]) + bytes(data.held_out[0].tokens[:-1])
    ).decode() == lines
    assert largest < 1 << 14
    assert len(lines) > 1 << 16


def test_a_single_text_is_cut_between_characters_for_a_learnt_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("ü" * 500 + "".join(TEXTS), encoding="utf-8")
    for share in (0.801, 0.802, 0.803):
        choice = DataChoice(data=str(path), tokenizer="bpe:262", held_out_share=share)
        data = prepare_data(choice, tmp_path / "prepared")
        parts = [data.train[0].tokens[:-1], data.held_out[0].tokens[:-1]]
        joined = "".join(data.tokenizer.decode(part) for part in parts)
        assert joined == path.read_text(encoding="utf-8")


def test_threads_read_rows_of_mapped_tokens_at_once(tmp_path: Path) -> None:
    data = _prepared(tmp_path, data=str(_text_folder(tmp_path / "texts")), packing="documents")
    samples = data.samples(8, seed=0)
    right = [samples.sample(k).tokens.tolist() for k in range(300)]
    found: list[list[list[int]]] = [[], []]

    def read(into: list[list[int]]) -> None:
        into.extend(samples.sample(k).tokens.tolist() for k in range(300))

    threads = [threading.Thread(target=read, args=(into,)) for into in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [right, right]


def test_a_file_that_changes_while_it_is_tokenised_looks_new_to_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = DataChoice(data=str(_text_folder(tmp_path / "texts")))
    tokenise = preparation._prepare

    def tokenise_and_change(*arguments: Any) -> Any:
        made = tokenise(*arguments)
        (tmp_path / "texts" / "000.txt").write_text("something else, and longer than before\n")
        return made

    monkeypatch.setattr(preparation, "_prepare", tokenise_and_change)
    prepare_data(choice, tmp_path / "out")

    assert left_there(choice, tmp_path / "out") is None


def test_a_tokenizer_of_one_token_has_a_vocabulary_of_one(tmp_path: Path) -> None:
    end = "<|endoftext|>"
    Tokenizer(models.WordLevel({end: 0}, unk_token=end)).save(str(tmp_path / "tokenizer.json"))

    assert read_tokenizer(tmp_path / "tokenizer.json").vocabulary == 1
