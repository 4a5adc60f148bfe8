"""Rows, their labels and their order: what the reader makes of sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright.collectives import LocalWorld, SingleCommunicator, random
from trainwright.integration.data import (
    Reader,
    Sequence,
    Shuffled,
    Stream,
    labels_of,
    ordinals_of,
    spread,
)
from trainwright.integration.data.orders import permuted
from trainwright.integration.errors import ConfigError
from trainwright.integration.feed import Feed
from trainwright.integration.sequence_part import SequencePart
from trainwright.sharding.context import ContextLayout

IGNORE = -100


def test_labels_stop_at_documents_and_padding() -> None:
    tokens = np.array([0, 1, 2, 10, 11, 12, 7])
    documents = np.array([0, 0, 0, 1, 1, 1, -1])

    assert labels_of(Sequence(tokens, documents)).tolist() == [1, 2, IGNORE, 11, 12, IGNORE]
    assert ordinals_of(documents).tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert ordinals_of(np.array([5, 5, 5, 9, 9, 9, 9, 9])).tolist() == [0, 1, 2, 0, 1, 2, 3, 4]


def test_an_end_token_that_also_pads_is_learnt_where_it_ends_a_text() -> None:
    # End and padding are both 2; rows hold [5, 6, 2] and [7, 2], each behind a first token 4.
    rows = [
        Sequence(np.array([4, 5, 6, 2]), np.array([0, 0, 0, 0])),
        Sequence(np.array([4, 7, 2, 2]), np.array([0, 0, 0, -1])),
    ]
    assert [labels_of(row).tolist() for row in rows] == [[5, 6, 2], [7, 2, IGNORE]]


def test_tokens_that_do_not_count_are_inputs_and_no_labels() -> None:
    counts = np.array([False, False, True, True, False])
    row = Sequence(np.array([1, 2, 3, 4, 5], np.uint16), counts=counts)
    assert labels_of(row).tolist() == [IGNORE, 3, 4, IGNORE]


def _reader(stream: np.ndarray, length: int, batch: int, *, seed: int = 0, **place: int) -> Reader:
    return Reader(Shuffled(Stream(stream, length), seed), batch, **place)


class _Rows:
    """Whole rows as sequences."""

    checksum = "0"

    def __init__(self, *rows: Sequence) -> None:
        self.rows = rows
        self.num_sequences = len(rows)

    def sequence(self, index: int) -> Sequence:
        return self.rows[index]


class _InOrder:
    """Rows that are not shuffled."""

    def __init__(self, *rows: Sequence) -> None:
        self.rows = rows

    def sample(self, position: int) -> Sequence:
        return self.rows[position % len(self.rows)]


def _inputs(cp: int, *rows: Sequence) -> list[dict[str, torch.Tensor]]:
    length = len(rows[0].tokens) - 1

    def work(comm):
        reader = Reader(_InOrder(*rows), len(rows))
        part = SequencePart(ContextLayout("zigzag", length, cp), comm)
        return Feed(reader, comm, part).next_batch().inputs(0, 0)

    return LocalWorld(cp).run(work)


def test_labels_are_shifted_before_the_zigzag_cut() -> None:
    # Eight inputs 0 to 7; the token after the last is none of theirs.
    row = Sequence(np.arange(9), np.array([0] * 8 + [-1]))

    first, second = _inputs(2, row)

    assert first["tokens_BS"].tolist() == [[0, 1, 6, 7]]
    assert first["labels_BS"].tolist() == [[1, 2, 7, IGNORE]]
    assert second["tokens_BS"].tolist() == [[2, 3, 4, 5]]
    assert second["labels_BS"].tolist() == [[3, 4, 5, 6]]


def test_context_ranks_get_all_documents_and_their_own_places_in_them() -> None:
    documents = np.array([0, 0, 0, 1, 1, 1, 1, 1, -1])
    rows = Sequence(np.arange(9), documents), Sequence(np.arange(9), documents * 0)

    first, second = _inputs(2, *rows)

    for inputs in (first, second):
        assert inputs["documents_BS"].tolist() == [documents[:8].tolist(), [0] * 8]
    assert first["positions_S"].tolist() == [0, 1, 6, 7]
    assert first["ordinals_BS"].tolist() == [[0, 1, 3, 4], [0, 1, 6, 7]]
    assert second["ordinals_BS"].tolist() == [[2, 0, 1, 2], [2, 3, 4, 5]]


def test_rows_of_one_document_say_nothing_of_documents() -> None:
    inputs = _inputs(1, Sequence(np.arange(9)))[0]
    assert sorted(inputs) == ["labels_BS", "positions_S", "tokens_BS"]


@given(st.lists(st.integers(1, 9), min_size=3, max_size=12), st.integers(2, 7))
def test_a_stream_with_boundaries_numbers_the_documents_of_each_row(
    lengths: list[int], length: int
) -> None:
    ends = np.cumsum(lengths)
    tokens = np.arange(ends[-1])
    if len(tokens) <= length:
        return
    owner = np.repeat(np.arange(len(lengths)), lengths)
    stream = Stream(tokens, length, ends=ends)

    for index in range(stream.num_sequences):
        row = stream.sequence(index)
        right = owner[row.tokens]
        assert row.documents is not None
        assert np.array_equal(row.documents, right - right[0])
        same = right[1:] == right[:-1]
        assert np.array_equal(labels_of(row), np.where(same, row.tokens[1:], IGNORE))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17, 100, 1025])
def test_an_order_without_a_table_is_a_permutation_and_differs_by_epoch_and_seed(n: int) -> None:
    orders = [
        [permuted(random.Key(seed, "data order", epoch), n, i) for i in range(n)]
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    for order in orders:
        assert sorted(order) == list(range(n))
    if n > 16:
        assert len({tuple(order) for order in orders}) == 3
        # No trace of the natural order: as many falls as rises, within four deviations.
        rises = int((np.diff(orders[0]) > 0).sum())
        assert abs(rises - (n - 1) / 2) <= 4 * ((n + 1) / 12) ** 0.5


def test_threads_in_two_epochs_do_not_make_their_orders_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[random.Key] = []
    permutation = random.permutation

    def counted(key: random.Key, n: int) -> torch.Tensor:
        made.append(key)
        return permutation(key, n)

    monkeypatch.setattr(random, "permutation", counted)
    samples = Shuffled(Stream(np.arange(9), 1), seed=3)
    places = [samples.place(position) for position in (0, 8, 1, 9, 2, 10, 16, 11)]

    assert len(made) == 3
    assert places[:2] == [Shuffled(samples.sequences, seed=3).place(p) for p in (0, 8)]


def test_a_place_among_very_many_sequences_needs_no_table() -> None:
    class Many:
        num_sequences = 10**15
        checksum = "0"

        def sequence(self, index: int) -> Sequence:
            return Sequence(np.array([index, index + 1]))

    samples = Shuffled(Many(), seed=3)
    places = [samples.place(position) for position in range(100)]
    assert len(set(places)) == 100
    assert max(places) < 10**15
    assert max(places) > 9 * 10**14
    assert places == [Shuffled(Many(), seed=3).place(position) for position in range(100)]


def test_batches_of_changing_sizes_are_one_order_on_any_number_of_ranks() -> None:
    stream = np.arange(41, dtype=np.uint8)
    sizes = [(4, 1), (4, 2), (8, 1), (12, 3), (8, 2), (4, 1)]
    whole = _reader(stream, 1, 40, seed=2)
    right = [int(whole.samples.sample(position).tokens[0]) for position in range(40)]

    for ranks in (1, 2, 4):
        readers = [
            _reader(stream, 1, 4, seed=2, data_rank=rank, data_size=ranks) for rank in range(ranks)
        ]
        found = []
        for size, microbatches in sizes:
            if size % (ranks * microbatches):
                microbatches = 1
            batches = [reader.next_batch(size, microbatches) for reader in readers]
            assert {len(batch.tokens_MBS) for batch in batches} == {microbatches}
            found += [token for batch in batches for token in batch.tokens_MBS.flatten().tolist()]
            # Every other rank goes on from the position alone.
            for reader in readers[1:]:
                reader.load_state_dict(readers[0].state_dict())
        assert found == right


def test_a_ramped_batch_that_cannot_be_shared_out_moves_no_position() -> None:
    reader = _reader(np.arange(41, dtype=np.uint8), 1, 4, data_size=2)
    with pytest.raises(ConfigError, match="4 or 6"):
        reader.next_batch(5)
    assert reader.state_dict() == {"consumed": 0}


def test_microbatches_hold_each_sample_of_an_epoch_once_on_one_and_two_ranks() -> None:
    stream = np.arange(9, dtype=np.uint8)
    for ranks in (1, 2):
        seen = []
        for rank in range(ranks):
            place = {"data_rank": rank, "data_size": ranks, "microbatches": 4 // ranks}
            batch = _reader(stream, 1, 8, **place).next_batch()
            assert batch.tokens_MBS.shape == (4 // ranks, 2, 1)
            seen += batch.tokens_MBS.flatten().tolist()
        assert sorted(seen) == list(range(8))


def test_rows_for_evaluation_have_the_labels_and_documents_of_training() -> None:
    documents = np.array([0, 0, 1, 1, -1])
    rows = spread(_Rows(*[Sequence(np.arange(5) + k, documents) for k in range(3)]), 2)

    assert rows.tokens_NS.tolist() == [[0, 1, 2, 3], [2, 3, 4, 5]]
    assert rows.labels_NS.tolist() == [[1, IGNORE, 3, IGNORE], [3, IGNORE, 5, IGNORE]]
    assert rows.documents_NS is not None
    assert rows.documents_NS.tolist() == [[0, 0, 1, 1]] * 2


def test_reading_draws_no_random_number_of_the_process() -> None:
    reader = _reader(np.arange(100, dtype=np.uint8), 3, 4)
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    reader.next_batch()
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


def test_one_rank_alone_reads_what_a_world_of_one_reads() -> None:
    reader = _reader(np.arange(100, dtype=np.uint8), 5, 4)
    part = SequencePart(ContextLayout("zigzag", 5, 1), SingleCommunicator())
    fed = Feed(reader, SingleCommunicator(), part).next_batch()
    alone = _reader(np.arange(100, dtype=np.uint8), 5, 4).next_batch()
    assert torch.equal(fed.part.tokens_MBS, alone.tokens_MBS)
