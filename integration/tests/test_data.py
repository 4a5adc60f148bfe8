"""Reading text: what is held out, the order of samples, resuming, and bad input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright.collectives import LocalWorld, SingleCommunicator
from trainwright.integration.data import Reader, Shuffled, Stream, fit_ngrams, read_corpus, spread
from trainwright.integration.errors import ConfigError, DataError
from trainwright.integration.feed import Feed
from trainwright.integration.sequence_part import SequencePart
from trainwright.sharding.context import ContextLayout
from trainwright.stability_guards import Positions

STREAM = (np.arange(1000) % 251).astype(np.uint8)


def _reader(stream: np.ndarray, length: int, batch: int, *, seed: int = 0, **place: int) -> Reader:
    return Reader(Shuffled(Stream(stream, length), seed), batch, **place)


def _folder(path: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        target = path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return path


def test_every_byte_of_every_text_file_is_either_trained_on_or_held_out(tmp_path: Path) -> None:
    files = {f"part{i // 10}/file{i}.txt": f"text number {i}\n".encode() for i in range(60)}
    folder = _folder(tmp_path, files)

    corpus = read_corpus(folder)

    read = (bytes(corpus.train) + bytes(corpus.held_out)).split(b"\0")
    assert sorted(read) == sorted([*files.values(), b"", b""][:-1])
    assert 1 <= bytes(corpus.held_out).count(b"\0") <= 12


def test_a_new_file_moves_no_other_file_between_the_parts(tmp_path: Path) -> None:
    files = {f"file{i}.txt": f"text number {i}\n".encode() for i in range(80)}
    before = read_corpus(_folder(tmp_path, files))

    after = read_corpus(_folder(tmp_path, {"a first file.txt": b"new\n"}))

    held_before = set(bytes(before.held_out).split(b"\0")) - {b""}
    held_after = set(bytes(after.held_out).split(b"\0")) - {b"", b"new\n"}
    assert held_before == held_after


def test_binary_files_of_a_folder_are_left_out_by_name(tmp_path: Path) -> None:
    files = {"a.txt": b"one\n", "b.bin": b"\0\1", "c.txt": b"two\n", "d.txt": b"\xff\xfe"}

    corpus = read_corpus(_folder(tmp_path, files))

    assert corpus.skipped == ("b.bin", "d.txt")
    assert corpus.files == 2


@pytest.mark.parametrize(
    ("content", "word"), [(None, "does not exist"), (b"", "empty"), (b"a\0b", "binary")]
)
def test_a_data_file_that_cannot_be_text_is_named(
    tmp_path: Path, content: bytes | None, word: str
) -> None:
    path = tmp_path / "data.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=word) as caught:
        read_corpus(path)
    assert str(path) in str(caught.value)


def test_a_folder_without_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file with text"):
        read_corpus(tmp_path)
    with pytest.raises(DataError, match="only binary"):
        read_corpus(_folder(tmp_path, {"x.bin": b"\0"}))


def test_a_stream_shorter_than_one_sequence_says_which_length_works() -> None:
    with pytest.raises(DataError, match="sequence length up to 9 works"):
        _reader(STREAM[:10], 10, 1)


@pytest.mark.parametrize(
    ("batch", "ranks", "microbatches", "nearest"),
    [(10, 4, 1, "8 or 12"), (3, 2, 2, "4 works"), (9, 2, 2, "8 or 12")],
)
def test_a_batch_that_cannot_be_shared_out_names_the_nearest_that_can(
    batch: int, ranks: int, microbatches: int, nearest: str
) -> None:
    with pytest.raises(ConfigError, match=nearest):
        _reader(STREAM, 10, batch, data_size=ranks, microbatches=microbatches)


@given(ranks=st.sampled_from([1, 2, 3, 4]), microbatches=st.sampled_from([1, 2]))
def test_data_ranks_together_read_the_global_batch_of_one_rank_in_order(
    ranks: int, microbatches: int
) -> None:
    whole = _reader(STREAM, 7, 24, seed=3)
    parts = [
        _reader(STREAM, 7, 24, seed=3, data_rank=r, data_size=ranks, microbatches=microbatches)
        for r in range(ranks)
    ]
    for _ in range(12):
        expected = whole.next_batch()
        batches = [part.next_batch() for part in parts]
        joined = torch.cat([batch.tokens_MBS.flatten(0, 1) for batch in batches])
        assert torch.equal(joined, expected.tokens_MBS[0])
        assert sum(batch.valid_tokens for batch in batches) == expected.valid_tokens


@given(stop=st.integers(0, 30))
def test_a_resumed_reader_yields_what_the_uninterrupted_one_does(stop: int) -> None:
    uninterrupted = _reader(STREAM, 9, 8, seed=1)
    batches = [uninterrupted.next_batch().tokens_MBS for _ in range(40)]
    first = _reader(STREAM, 9, 8, seed=1)
    for _ in range(stop):
        first.next_batch()

    # Resumed twice, the second time before anything was read.
    second = _reader(STREAM, 9, 8, seed=1)
    second.load_state_dict(first.state_dict())
    third = _reader(STREAM, 9, 8, seed=1)
    third.load_state_dict(second.state_dict())

    assert all(torch.equal(third.next_batch().tokens_MBS, batch) for batch in batches[stop:])


def _read(num_samples: int, batch: int, steps: int, **place: int) -> tuple[list[int], Reader]:
    stream = np.arange(num_samples + 1, dtype=np.uint8)
    reader = _reader(stream, 1, batch, seed=11, **place)
    return _samples(reader, steps), reader


def _samples(reader: Reader, steps: int) -> list[int]:
    return [
        sample for _ in range(steps) for sample in reader.next_batch().tokens_MBS.flatten().tolist()
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_samples_after_a_stop_at_any_batch_of_any_epoch_are_those_of_a_run_never_stopped(
    ranks: int,
) -> None:
    places = [{"data_rank": rank, "data_size": ranks} for rank in range(ranks)]
    whole = [_read(20, 2, 30, **place)[0] for place in places]

    for stop in range(31):
        for place, right in zip(places, whole, strict=True):
            before, reader = _read(20, 2, stop, **place)
            _, resumed = _read(20, 2, 0, **place)
            resumed.load_state_dict(reader.state_dict())
            assert before + _samples(resumed, 30 - stop) == right

    together = [sample for row in zip(*whole, strict=True) for sample in row]
    for epoch in range(3):
        assert sorted(together[20 * epoch : 20 * epoch + 20]) == list(range(20))


def test_a_second_resume_in_an_epoch_counts_from_the_beginning_of_the_run() -> None:
    whole, _ = _read(50, 1, 101)
    _, first = _read(50, 1, 30)
    _, second = _read(50, 1, 0)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict() == {"consumed": 30}
    _samples(second, 10)
    _, third = _read(50, 1, 0)
    third.load_state_dict(second.state_dict())

    assert _samples(third, 1) == whole[40:41]
    _, ended = _read(50, 1, 50)
    _, after = _read(50, 1, 0)
    after.load_state_dict(ended.state_dict())
    assert _samples(after, 51) == whole[50:101]  # the second epoch, once


def test_the_place_of_a_resume_is_skipped_in_its_own_epoch_only() -> None:
    whole, _ = _read(10, 2, 20)
    _, reader = _read(10, 2, 0)
    reader.load_state_dict({"consumed": 6})
    resumed = _samples(reader, 17)

    assert resumed == whole[6:]
    for epoch in range(3):
        assert sorted(resumed[4 + 10 * epoch :][:10]) == list(range(10))


def test_each_epoch_is_another_permutation_of_all_sequences() -> None:
    reader = _reader(STREAM, 9, 1, seed=5)
    epochs = []
    for _ in range(3):
        rows = [reader.next_batch().tokens_MBS.flatten() for _ in range((len(STREAM) - 1) // 9)]
        epochs.append([tuple(row.tolist()) for row in rows])

    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]


def test_labels_are_the_following_bytes() -> None:
    batch = _reader(np.arange(200, dtype=np.uint8), 10, 3, seed=0).next_batch()
    assert torch.equal(batch.labels_MBS, batch.tokens_MBS + 1)


def test_the_feed_reports_the_position_of_batches_handed_out_and_the_global_token_count() -> None:
    def work(comm):
        reader = _reader(STREAM, 7, 8, data_rank=comm.rank, data_size=comm.size)
        whole = SequencePart(ContextLayout("zigzag", 7, 1), SingleCommunicator())
        feed = Feed(reader, comm, whole)
        positions = [feed.state_dict()["consumed"]]
        divisors = []
        for _ in range(3):
            divisors.append(float(feed.next_batch().divisor))
            positions.append(feed.state_dict()["consumed"])
        feed.load_state_dict({"consumed": 8})
        return positions, divisors, feed.next_batch().part.positions

    for positions, divisors, first in LocalWorld(2).run(work):
        assert positions == [0, 8, 16, 24]
        assert divisors == [56.0, 56.0, 56.0]
        assert first == Positions([(8, 16)])


def test_what_is_left_out_is_read_by_no_data_rank_and_the_rest_in_the_same_order() -> None:
    def work(comm):
        reader = _reader(STREAM, 7, 4, data_rank=comm.rank, data_size=comm.size)
        whole = SequencePart(ContextLayout("zigzag", 7, 1), SingleCommunicator())
        feed = Feed(reader, comm, whole)
        feed.next_batch()
        feed.seek(4, Positions([(5, 8), (9, 10)]))
        batch = feed.next_batch()
        return batch.part.tokens_MBS.flatten(0, 1), feed.last, feed.position

    parts, lasts, positions = zip(*LocalWorld(2).run(work), strict=True)

    plain = _reader(STREAM, 7, 1)
    rows = [plain.samples.sample(place).tokens[:-1] for place in (4, 8, 10, 11)]
    right = [torch.from_numpy(row.astype("int64")) for row in rows]
    assert torch.equal(torch.cat(parts), torch.stack(right))
    assert set(lasts) == {Positions([(4, 5), (8, 9), (10, 12)])}
    assert set(positions) == {12}


def test_evaluation_sequences_are_spread_over_the_stream_and_never_repeat() -> None:
    stream = Stream(np.arange(250, dtype=np.uint8), 10)
    rows = spread(stream, 5)
    assert rows.tokens_NS[:, 0].tolist() == [0, 50, 110, 170, 230]
    assert torch.equal(rows.labels_NS, rows.tokens_NS + 1)
    assert len(spread(stream, 99).tokens_NS) == 24


def test_ngram_losses_are_the_entropies_of_a_known_source() -> None:
    generator = np.random.default_rng(0)
    # After byte 0 comes 1 or 2 with equal chances, after those comes 0: ln(2) / 2 nats a byte.
    choices = generator.integers(1, 3, size=50_000)
    stream = np.stack((np.zeros_like(choices), choices), axis=1).flatten().astype(np.uint8)

    bigram, trigram = fit_ngrams(stream).losses(stream[:1001][None])

    assert abs(bigram - np.log(2) / 2) < 0.02
    assert abs(trigram - np.log(2) / 2) < 0.02


def test_the_trigram_model_knows_more_than_the_bigram_where_context_matters() -> None:
    stream = np.frombuffer(b"abcabdacb" * 300, dtype=np.uint8)
    bigram, trigram = fit_ngrams(stream).losses(stream[None, :500])
    assert trigram < bigram - 0.1


def test_ngram_probabilities_sum_to_one_and_every_byte_is_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = np.random.default_rng(0).integers(0, 256, 1003).astype(np.uint8)
    whole = fit_ngrams(stream)
    every = np.arange(256)
    for before, previous in ((1, 2), (int(stream[5]), int(stream[6])), (255, 0)):
        given = np.full(256, before), np.full(256, previous)
        assert abs(whole.bigram(given[1], every).sum() - 1) < 1e-12
        assert abs(whole.trigram(*given, every).sum() - 1) < 1e-12
    # Chunks that end with the stream, and one, two and many places before it.
    for chunk in (500, 1000, 1001, 1002):
        monkeypatch.setattr("trainwright.integration.data.ngram.CHUNK", chunk)
        cut = fit_ngrams(stream)
        assert cut.pairs.sum() == 1002
        assert np.array_equal(cut.pairs, whole.pairs)
        assert np.array_equal(cut.triples, whole.triples)
