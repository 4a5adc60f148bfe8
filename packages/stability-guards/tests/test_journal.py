"""The journal outlives crashes; positions are sets; metrics and journals can be replayed."""

import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.collectives import LocalWorld
from trainwright.stability_guards import (
    FileJournal,
    GuardError,
    Intervention,
    JournalError,
    MemoryJournal,
    NonFiniteGuard,
    Positions,
    Report,
    Verdict,
    read_metrics,
    replay,
    reports_of,
    shared_journal,
)
from trainwright.stability_guards.testing import law_a_journal_keeps_what_was_appended, positions


def members(spans):
    return {at for start, stop in spans for at in range(start, stop)}


@given(a=positions(), b=positions(), at=st.integers(0, 40))
def test_positions_are_a_set(a, b, at):
    first, second = a.spans, b.spans

    assert {n for n in range(50) if n in a} == members(first)
    assert a.count == len(members(first))
    assert bool(a) == bool(members(first))
    assert {n for n in range(50) if n in a | b} == members(first) | members(second)
    assert a.before(at) | a.from_position(at) == a
    assert all(n >= at for span in a.from_position(at).spans for n in range(*span))
    assert Positions.from_json(json.loads(json.dumps(a.as_json()))) == a
    assert (a == b) == (members(first) == members(second))


@given(left_out=positions(), position=st.integers(0, 40), count=st.integers(0, 12))
def test_a_batch_is_the_next_positions_that_are_not_left_out(left_out, position, count):
    gone = members(left_out.spans)
    expected = [at for at in range(position, 200) if at not in gone][:count]

    batch, after = left_out.draw(position, count)

    assert sorted(members(batch.spans)) == expected
    if count:
        assert after == expected[-1] + 1


@given(left_out=positions(), sizes=st.lists(st.integers(1, 5), max_size=6))
def test_batches_in_turn_yield_everything_that_is_not_left_out(left_out, sizes):
    position, seen = 0, []
    for size in sizes:
        batch, position = left_out.draw(position, size)
        seen += sorted(members(batch.spans))

    assert seen == [at for at in range(200) if at not in members(left_out.spans)][: sum(sizes)]


def test_positions_read_single_numbers_and_refuse_the_rest():
    assert str(Positions.from_json([4, [7, 9], 5])) == "4-5, 7-8"
    assert str(Positions()) == "none"
    for data in ({"a": 1}, ["4"], [[1, 2, 3]], [True], [1.0]):
        with pytest.raises(GuardError, match="data positions must be"):
            Positions.from_json(data)
    with pytest.raises(GuardError, match=r"0 <= start <= stop, got \[5, 3\)"):
        Positions([(5, 3)])


def intervention(number, **changes):
    values = {
        "number": number,
        "verdict": Verdict.ROLLBACK,
        "step": 7,
        "updates": 6,
        "batch": Positions([(56, 64)]),
        "left_out": Positions([(48, 64)]),
        "reason": "step 7: loss is high",
        "loss": 3.5,
        "norm": math.inf,
        "back_to": 5,
        "position": 40,
        "attempt": 1,
    }
    return Intervention(**{**values, **changes})


def test_a_journal_is_read_again_as_it_was_written(tmp_path):
    path = tmp_path / "journal.jsonl"
    entries = [intervention(0), intervention(1, verdict=Verdict.SKIP, back_to=None)]

    law_a_journal_keeps_what_was_appended(lambda: FileJournal(path), entries)

    assert entries[0].norm is None
    assert all(json.loads(line)["step"] == 7 for line in path.read_text().splitlines())


@given(cut=st.integers(1, 400))
def test_a_torn_last_line_is_cut_off_and_writing_goes_on(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    journal = FileJournal(path)
    journal.append(intervention(0))
    whole = path.stat().st_size
    journal.append(intervention(1))
    content = path.read_bytes()
    path.write_bytes(content[: max(whole, len(content) - cut)])

    resumed = FileJournal(path)
    resumed.append(intervention(1, reason="again"))

    assert [entry.reason for entry in FileJournal(path).entries] == [
        "step 7: loss is high",
        "again",
    ]


def test_what_a_failed_append_has_left_is_no_line(tmp_path, monkeypatch):
    path = tmp_path / "journal.jsonl"
    journal = FileJournal(path)
    journal.append(intervention(0))

    def full(handle):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            journal.append(intervention(1, reason="a longer reason than the next"))
    assert len(journal.entries) == 1

    journal.append(intervention(1, reason="short"))

    assert [entry.reason for entry in FileJournal(path).entries][1:] == ["short"]


def test_a_journal_that_somebody_removed_or_shortened_takes_no_further_entry(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = FileJournal(path)
    journal.append(intervention(0))
    whole = path.read_bytes()

    for left in (None, whole[:-3]):
        path.unlink(missing_ok=True)
        if left is not None:
            path.write_bytes(left)
        with pytest.raises(JournalError, match="put it back"):
            journal.append(intervention(1))
    path.write_bytes(whole)
    journal.append(intervention(1))

    assert FileJournal(path).entries == journal.entries


def test_a_damaged_line_and_a_number_out_of_order_are_refused(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = FileJournal(path)
    journal.append(intervention(0))
    with pytest.raises(JournalError, match="the next intervention has number 1, got 3"):
        journal.append(intervention(3))
    with pytest.raises(JournalError, match="the next intervention has number 0, got 1"):
        MemoryJournal().append(intervention(1))
    sound = intervention(0).as_json()
    for bad in (
        *("{}", "nonsense", "[1]", "[" * 100_000, '{"number": 0, "verdict": "WHAT"}'),
        json.dumps({**sound, "loss": 10**400}),
        json.dumps({**sound, "step": "7"}),
        json.dumps({**sound, "updates": -1}),
        json.dumps({**sound, "back_to": []}),
        json.dumps({**sound, "reason": None}),
    ):
        path.write_text(bad + "\n")
        with pytest.raises(JournalError, match=r"line 1 of .*journal.jsonl cannot be read"):
            FileJournal(path)


def test_a_damaged_journal_is_refused_on_every_rank(tmp_path):
    (tmp_path / "journal.jsonl").write_text("nonsense\n")

    def read(communicator):
        try:
            shared_journal(tmp_path / "journal.jsonl", communicator)
        except JournalError as error:
            return str(error)
        return ""

    messages = LocalWorld(2).run(read)

    assert messages[0] == messages[1]
    assert "line 1" in messages[0]


def test_what_the_first_rank_cannot_write_is_an_error_on_every_rank_and_no_entry(tmp_path):
    path = tmp_path / "journal.jsonl"

    def append(communicator):
        journal = shared_journal(path, communicator)
        journal.append(intervention(0))
        content = path.read_bytes()
        communicator.barrier()
        if communicator.rank == 0:
            path.unlink()
            path.mkdir()
        with pytest.raises(JournalError, match="could not journal what is to be done at step"):
            journal.append(intervention(1))
        communicator.barrier()
        if communicator.rank == 0:
            path.rmdir()
            path.write_bytes(content)
        communicator.barrier()
        journal.append(intervention(1))
        return journal.entries

    entries = LocalWorld(3).run(append)

    assert entries == [FileJournal(path).entries] * 3
    assert [entry.number for entry in entries[0]] == [0, 1]


def test_metrics_are_replayed_with_null_as_nan_and_without_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"step": 1, "loss": 2.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 8},
        {"step": 2, "loss": None, "grad_norm": None, "lr": 0.0, "tokens": 8, "verdict": "SKIP"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "lo')

    reports = list(read_metrics(path))
    alarms = replay(reports, NonFiniteGuard())

    assert reports[0] == Report(1, 2.0, 1.0, tokens=8, signals={"lr": 0.1})
    assert [(a.step, a.verdict, a.reason) for a in alarms] == [
        (2, Verdict.SKIP, "step 2: loss is nan; 1 in a row")
    ]


def test_a_journal_is_replayed_too():
    entries = [intervention(0, loss=math.nan), intervention(1, norm=2.0)]

    assert [alarm.step for alarm in replay(reports_of(entries), NonFiniteGuard())] == [7]


def test_metrics_that_are_none_are_refused_with_their_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for text, why in (
        ("{\n{}\n", "line 1 of .* is not JSON"),
        ('{"step": 1, "loss": 1}\n', "must have norm, got"),
        ("[]\n", "must be an object, got list"),
        ('{"step": 1, "loss": "5", "norm": 1}\n', "line 1 of .*: loss must be a number or null"),
        ('{"step": 1, "loss": 5, "norm": {}}', "the last line of .*: norm must be a number"),
        ('{"step": 1, "loss": 5, "norm": 1%s}' % ("0" * 400), "norm is larger than any float"),
        ('{"step": 1, "loss": 5, "norm": 1, "lr": 1%s}\n' % ("0" * 400), "lr is larger than any"),
        ("[" * 100_000, "the last line of .* is not JSON"),
        ("[" * 100_000 + "\n", "line 1 of .* is not JSON"),
    ):
        path.write_text(text)
        with pytest.raises(GuardError, match=why):
            list(read_metrics(path))
