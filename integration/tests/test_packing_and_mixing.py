"""Whole documents in rows, sources by weight, batches read ahead: the same in every layout."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright.collectives import LocalWorld, SingleCommunicator
from trainwright.integration.cli import main
from trainwright.integration.data import (
    DataChoice,
    Mixture,
    Reader,
    Sequence,
    Shuffled,
    Stream,
    Tokens,
    Turns,
    WholeDocuments,
    labels_of,
    open_data,
    ordinals_of,
    prepare_data,
)
from trainwright.integration.data.choice import parse_paths
from trainwright.integration.data.prefetch import ReadAhead
from trainwright.integration.errors import ConfigError, DataError
from trainwright.integration.feed import Feed
from trainwright.integration.sequence_part import SequencePart
from trainwright.sharding.context import ContextLayout
from trainwright.stability_guards import Positions


@given(st.lists(st.integers(1, 20), min_size=1, max_size=15), st.integers(1, 9))
def test_whole_documents_lose_no_token_and_learn_none_twice(
    lengths: list[int], length: int
) -> None:
    ends = np.cumsum(lengths)
    tokens = np.arange(1, ends[-1] + 1)
    if len(tokens) < 2:
        return
    owner = np.repeat(np.arange(len(lengths)), lengths)
    rows = WholeDocuments(tokens, ends, length)

    learnt: list[int] = []
    for index in range(rows.num_sequences):
        row = rows.sequence(index)
        assert row.documents is not None
        assert len(row.tokens) == length + 1
        held = row.tokens[row.documents >= 0]
        assert (row.tokens[row.documents < 0] == 0).all()
        assert len(np.unique(owner[held - 1])) == row.documents.max() + 1
        whole = [d for d in np.unique(owner[held - 1]) if lengths[d] <= length + 1]
        # A document that fits into a row is in one, from its first token to its last.
        for document in whole:
            assert (owner[held - 1] == document).sum() == lengths[document]
        labels = labels_of(row)
        learnt += labels[labels >= 0].tolist()
    firsts = {int(end - size + 1) for end, size in zip(ends, lengths, strict=True)}
    assert sorted(learnt) == sorted(set(tokens.tolist()) - firsts)


def test_documents_of_a_pack_count_their_own_places() -> None:
    rows = WholeDocuments(np.arange(1, 9), np.array([3, 8]), 8)
    row = rows.sequence(0)
    assert row.documents is not None
    assert ordinals_of(row.documents[:-1]).tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    with pytest.raises(DataError, match="no document of two tokens"):
        WholeDocuments(np.arange(0), np.array([], np.int64), 8)


def test_where_rows_of_documents_begin_is_listed_once_in_a_file_that_all_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = np.cumsum([3, 9, 30, 1, 1, 7, 12])
    tokens = np.arange(ends[-1])
    in_memory = WholeDocuments(tokens, ends, 8)
    monkeypatch.setattr("trainwright.integration.data.row_table.BLOCK", 2)

    made = WholeDocuments(tokens, ends, 8, beside=tmp_path / "0.train")
    written = (tmp_path / "0.train.rows-8").stat().st_mtime_ns
    mapped = WholeDocuments(tokens, ends, 8, beside=tmp_path / "0.train")

    assert [path.name for path in tmp_path.iterdir()] == ["0.train.rows-8"]
    assert (tmp_path / "0.train.rows-8").stat().st_mtime_ns == written
    assert isinstance(mapped._starts, np.memmap)
    assert made.num_sequences == mapped.num_sequences == in_memory.num_sequences > 6
    for index in range(made.num_sequences):
        right, found = in_memory.sequence(index), mapped.sequence(index)
        assert right.tokens.tolist() == found.tokens.tolist()
        assert right.documents is not None
        assert found.documents is not None
        assert right.documents.tolist() == found.documents.tolist()
    # One that is cut off is not taken, nor an empty one.
    for rows in (in_memory.num_sequences - 1, 0):
        os.truncate(tmp_path / "0.train.rows-8", 8 * rows)
        cut = WholeDocuments(tokens, ends, 8, beside=tmp_path / "0.train")
        assert cut.num_sequences == in_memory.num_sequences
    # One of other documents is not taken, nor a folder needed to which nobody may write.
    np.array([5, 9]).tofile(tmp_path / "0.train.rows-8")
    nowhere = tmp_path / "missing" / "0.train"
    for beside in (tmp_path / "0.train", nowhere):
        other = WholeDocuments(tokens, ends, 8, beside=beside)
        assert other.num_sequences == in_memory.num_sequences


@given(st.integers(2, 40), st.integers(1, 9), st.booleans(), st.booleans())
def test_with_its_tail_every_token_of_a_stream_is_a_target_once(
    size: int, length: int, packed: bool, counted: bool
) -> None:
    if size <= length:
        return
    tokens = np.arange(1, size + 1)
    counts = tokens % 3 != 0 if counted else None
    ends = np.arange(5, size + 5, 5).clip(max=size) if packed else None

    whole = Stream(tokens, length, ends=ends, counts=counts)
    rows = Stream(tokens, length, ends=ends, counts=counts, tail=True)

    found = [rows.sequence(index) for index in range(rows.num_sequences)]
    assert all(len(row.tokens) == length + 1 for row in found)
    for index in range(whole.num_sequences):
        assert labels_of(whole.sequence(index)).tolist() == labels_of(found[index]).tolist()
    learnt = [int(label) for row in found for label in labels_of(row) if label >= 0]
    is_target = [not (packed and t % 5 == 1) and not (counted and t % 3 == 0) for t in tokens]
    wanted = [int(token) for token, is_one in zip(tokens, is_target, strict=True) if is_one]
    wanted = [token for token in wanted if token > 1]
    assert learnt == wanted
    assert rows.num_sequences - whole.num_sequences == ((size - 1) % length > 0)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_shares_of_any_first_samples_are_exact_to_less_than_one(weights: list[int]) -> None:
    turns = Turns.of([Fraction(weight, 7) for weight in weights])
    total = sum(weights)
    seen: list[list[int]] = [[] for _ in weights]
    for position in range(2 * len(turns.sources) + 3):
        source, place = turns.place(position)
        seen[source].append(place)
        for k, weight in enumerate(weights):
            assert abs(len(seen[k]) * total - (position + 1) * weight) < total
        assert turns.prefix(position + 1) == [len(places) for places in seen]
    # Each source goes on by itself, without gaps.
    assert all(places == list(range(len(places))) for places in seen)


class _Source:
    def __init__(self, first: int) -> None:
        self.first = first

    def sample(self, position: int) -> Sequence:
        return Sequence(np.array([self.first + position] * 2))


def test_a_mixture_goes_on_from_its_position_on_any_number_of_ranks() -> None:
    def mixture() -> Mixture:
        return Mixture([_Source(0), _Source(1000)], [Fraction("0.7"), Fraction("0.3")])

    right = [int(mixture().sample(k).tokens[0]) for k in range(40)]
    assert sum(token >= 1000 for token in right) == 12
    for ranks in (1, 2, 4):
        found = []
        for rank in range(ranks):
            reader = Reader(mixture(), 8, data_rank=rank, data_size=ranks)
            reader.load_state_dict({"consumed": 16})
            found += reader.next_batch().tokens_MBS.flatten().tolist()
        assert found == right[16:24]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a@1,b", "'b' has no weight"),
        ("a,b", "'a' has no weight"),
        ("a@0,b@1", "weight '0' must be a positive"),
        ("a@-1,b@1", "weight '-1' must be a positive"),
        ("a@x,b@1", "weight 'x' must be a positive"),
        ("a@nan,b@1", "weight 'nan' must be a positive"),
        ("a@1,@2", "'@2' has no weight"),
        ("a@1/0,b@1", "must be a positive"),
    ],
)
def test_weights_that_cannot_be_are_refused(text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        DataChoice(data=text)


def test_a_name_that_exists_is_one_path_whatever_is_in_it(tmp_path: Path) -> None:
    odd = tmp_path / "a@1,b"
    odd.write_text("text")
    assert [path.path for path in parse_paths(str(odd))] == [odd]
    assert [path.weight for path in parse_paths("a@1,b@0.25")] == [1, Fraction(1, 4)]
    with pytest.raises(ConfigError, match="fewer digits"):
        Turns.of([Fraction("0.3333333"), Fraction("0.6666667")])


def test_sources_of_several_formats_are_mixed_and_held_out_by_their_weights(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": "a" * 20}) + "\n" for _ in range(60)))
    text = tmp_path / "b.txt"
    text.write_text("b" * 2000)
    apart = tmp_path / "c.txt"
    apart.write_text("c" * 300)
    choice = DataChoice(data=f"{lines}@3,{text}@1")

    data = prepare_data(choice, tmp_path / "both")
    samples = data.samples(10, seed=0)
    found = [bytes(samples.sample(k).tokens[:5].astype(np.uint8)) for k in range(40)]

    assert sum(b"b" in row for row in found) == 10
    rows = data.held_out_rows(10, 4)
    assert [int(row[0]) for row in rows.tokens_NS].count(ord("b")) == 1
    assert data.byte_stream is None
    other = DataChoice(data=f"{lines}@3,{text}@1", held_out=str(apart))
    whole = prepare_data(other, tmp_path / "apart")
    assert bytes(whole.held_out_rows(10, 4).tokens_NS[0].tolist()) == b"c" * 10
    assert (
        sum(map(len, whole.train)) == sum(map(len, data.train)) + sum(map(len, data.held_out)) - 1
    )
    assert whole.checksum != data.checksum


def test_tokenised_folders_are_data_of_many_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "a.txt"
    text.write_text("".join(f"words and more words {k % 50}\n" for k in range(400)))
    made, other = tmp_path / "made", tmp_path / "other"
    command = ["data", "tokenize", str(text), "--tokenizer", "bpe:280"]
    assert main([*command, "--out", str(made)]) == 0
    assert "280 kinds of tokens" in capsys.readouterr().out
    assert main(["data", "tokenize", str(text), "--held-out-share", "0", "--out", str(other)]) == 0
    assert main([*command, "--out", str(tmp_path)]) == 2
    assert "holds something else" in capsys.readouterr().err
    assert main(["data", "tokenize", f"{text}@1,{text}@2", "--out", str(made)]) == 2

    data = prepare_data(DataChoice(data=str(made), packing="documents"), tmp_path / "run")

    direct = open_data(made)
    assert np.array_equal(data.train[0].tokens, direct.train[0].tokens)
    assert data.tokenizer.describe() == direct.tokenizer.describe()
    # Tokens stay where they are.
    left = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert left == ["glimpse.txt", "manifest.json", "tokenizer.json"]
    with pytest.raises(ConfigError, match="another tokenizer"):
        prepare_data(DataChoice(data=f"{made}@1,{other}@1"), tmp_path / "run")
    alone = prepare_data(DataChoice(data=str(other)), tmp_path / "alone")
    with pytest.raises(DataError, match=r"nothing of .* is held out"):
        alone.held_out_rows(8, 1)


def test_items_read_ahead_come_in_order_whatever_threads_are_faster() -> None:
    def start_of(limit: int) -> tuple[Callable[[], Callable[[], int]], list[int]]:
        started: list[int] = []

        def start() -> Callable[[], int]:
            number = len(started)
            started.append(number)

            def read() -> int:
                time.sleep(0.002 * (number % 3))
                if number == limit:
                    raise OSError(f"item {number} is damaged")
                return number

            return read

        return start, started

    for depth, workers in ((0, 1), (1, 1), (3, 2), (4, 8)):
        start, started = start_of(limit=16)
        ahead = ReadAhead(start, depth, workers)
        assert [ahead.next() for _ in range(8)] == list(range(8))
        assert len(started) <= 8 + depth
        ahead.drop()
        assert ahead.next() == len(started) - 1 - depth
        with pytest.raises(OSError, match="item 16 is damaged"):
            list(iter(ahead.next, None))
        before = threading.active_count()
        ahead.close()
        assert threading.active_count() <= before - min(workers, depth, 1)


def _feed(ahead: int, rank: int = 0, ranks: int = 1, comm: Any = None) -> Feed:
    tokens = (np.arange(2000) % 251).astype(np.uint8)
    samples = Shuffled(Stream(tokens, 7, ends=np.arange(11, 2001, 11)), seed=5)
    reader = Reader(samples, 8, data_rank=rank, data_size=ranks, microbatches=2)
    part = SequencePart(ContextLayout("zigzag", 7, 1), SingleCommunicator())
    return Feed(reader, comm or SingleCommunicator(), part, ahead=ahead)


@pytest.mark.parametrize("ranks", [1, 2])
def test_batches_read_ahead_are_those_read_when_asked_for_and_only_handed_out_ones_count(
    ranks: int,
) -> None:
    def work(comm: Any) -> list[Any]:
        found: list[Any] = []
        for ahead in (0, 1, 5):
            feed = _feed(ahead, comm.rank, comm.size, comm)
            seen = []
            for step in range(6):
                if step == 3:
                    feed.seek(8, Positions([(9, 12)]))
                batch = feed.next_batch()
                inputs = batch.inputs(0, 1)
                seen.append(
                    [feed.state_dict(), str(feed.last), float(batch.divisor)]
                    + [inputs[name].tolist() for name in sorted(inputs)]
                )
            feed.close()
            found.append(seen)
        return found

    for zero, one, five in LocalWorld(ranks).run(work):
        assert zero == one == five
        assert [seen[0]["consumed"] for seen in zero] == [8, 16, 24, 19, 27, 35]
        assert len(zero[0]) == 3 + 5


def test_readers_on_threads_draw_nothing_from_the_generators_of_the_process() -> None:
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    feed = _feed(ahead=3)
    first = [feed.next_batch().part.tokens_MBS for _ in range(30)]
    feed.close()
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    # Epochs differ, and the same run reads the same again.
    again = _feed(ahead=1)
    assert all(torch.equal(batch, again.next_batch().part.tokens_MBS) for batch in first)
    again.close()


def test_a_stream_without_ends_is_no_packed_data() -> None:
    with pytest.raises(ConfigError, match="nothing tells where documents"):
        Tokens(np.arange(20)).rows(4, "documents")
