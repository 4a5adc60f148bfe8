"""Readers of tables, journals, metrics and names of layouts, with sound inputs for them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzzing import Reader
from trainwright.collectives import Box, CollectiveError, ShardSpec
from trainwright.collectives.flight import FlightRecorder, Record, from_json
from trainwright.pipeline_schedules import (
    Action,
    ScheduleError,
    dualpipe_v,
    forward_only,
    gpipe,
    lower,
    one_f_one_b,
    read_csv,
    simulate,
    to_csv,
    verify,
    zb_h1,
)
from trainwright.sharding import MeshShape, ShardingError
from trainwright.stability_guards import (
    FileJournal,
    GuardError,
    Intervention,
    Positions,
    Verdict,
    read_metrics,
    reports_of,
)


def of_file(use: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Return what writes an input to a file and gives its path to ``use``.

    The file is memory without a name: opening one on a disk takes longer than to read it.
    """
    number = os.memfd_create("input")
    path = Path(f"/proc/self/fd/{number}")

    def read(data: bytes) -> object:
        os.ftruncate(number, 0)
        os.pwrite(number, data, 0)
        return use(path)

    weakref.finalize(read, os.close, number)
    return read


def schedule_tables() -> Reader:
    """Return the reader of tables of schedules; what is accepted is also verified and written."""
    schedules = [
        gpipe(2, 2),
        lower(one_f_one_b(2, 2)),
        zb_h1(2, 3),
        dualpipe_v(2, 4),
        forward_only(2, 2),
    ]

    def read(path: Path) -> object:
        schedule = read_csv(path)
        with contextlib.suppress(ScheduleError):  # that it works is another question
            text = to_csv(schedule)
            path.write_text(text)
            assert read_csv(path) == schedule
        with contextlib.suppress(ScheduleError):
            verify(schedule)
            if not schedule.lowered:
                simulate(schedule)
        return schedule

    seeds = [to_csv(schedule).encode() for schedule in schedules]
    return Reader(of_file(read), seeds, (ScheduleError,))


def actions() -> Reader:
    """Return the reader of single actions of schedules."""

    def read(data: bytes) -> object:
        action = Action.parse(data.decode("utf-8", "surrogateescape"))
        assert Action.parse(str(action)) == action
        return action

    seeds = [b"0F0", b"1RECV_B3", b"2UNSHARD", b"0REDUCE_GRAD", b"11W107"]
    return Reader(read, seeds, (ScheduleError,))


def journals() -> Reader:
    """Return the reader of journals of interventions; an accepted one is gone on with."""
    folder = tempfile.mkdtemp(prefix="fuzz-")
    whole = FileJournal(Path(folder, "journal"))
    for entry in _interventions():
        whole.append(entry)
    seed = Path(folder, "journal").read_bytes()
    shutil.rmtree(folder)

    def read(path: Path) -> object:
        journal = FileJournal(path)
        entries = journal.entries
        assert [Intervention.from_json(e.as_json()) for e in entries] == list(entries)
        return entries, list(reports_of(entries))

    return Reader(of_file(read), [seed, seed.splitlines(keepends=True)[0]], (GuardError,))


def _interventions() -> list[Intervention]:
    batch, rest = Positions([(4, 8)]), Positions([(4, 8), (12, 13)])
    return [
        Intervention(0, Verdict.SKIP, 3, 2, batch, batch, "a spike", 2.5, None),
        Intervention(1, Verdict.ROLLBACK, 5, 4, rest, rest, "loss é", 9.0, 1.5, 2, 8, 1),
        Intervention(2, Verdict.HALT, 7, 5, batch, Positions(), "", None, None),
    ]


def metrics() -> Reader:
    """Return the reader of ``metrics.jsonl``."""
    rows: list[dict[str, Any]] = [
        {"step": 0, "loss": 5.5, "grad_norm": 1.0, "tokens": 64, "lr": 0.1, "note": "x"},
        {"step": 1, "loss": None, "grad_norm": None, "non_finite": 3},
        {"step": 2, "loss": 5.25, "norm": 0.5, "signals": {"largest": 2}},
    ]
    seed = "".join(json.dumps(row) + "\n" for row in rows).encode()
    read = of_file(lambda path: list(read_metrics(path)))
    return Reader(read, [seed, seed[:-9], seed[:70]], (GuardError,))


def positions() -> Reader:
    """Return the reader of lists of data positions, as files to exclude hold them."""

    def read(data: bytes) -> object:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise GuardError("no JSON") from error  # which is not the reader's
        found = Positions.from_json(value)
        assert Positions.from_json(found.as_json()) == found
        return found, str(found), found.count

    return Reader(read, [b"[1, 2, [5, 9], [7, 12]]", b"[]", b"[[0, 1]]"], (GuardError,))


def shard_specs() -> Reader:
    """Return the reader of descriptions of shards."""
    spec = ShardSpec.of_boxes("w", (4, 6), [Box((0, 0), (4, 3)), Box((0, 4), (4, 6))], ("dp",))
    part = spec.narrow(3, 9)

    def read(data: bytes) -> object:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CollectiveError("no JSON") from error
        found = ShardSpec.from_json(value)
        assert ShardSpec.from_json(found.to_json()) == found
        return found, found.numel, found.local_shape

    seeds = [json.dumps(each.to_json()).encode() for each in (spec, part)]
    return Reader(read, seeds, (CollectiveError,))


def flights() -> Reader:
    """Return the reader of what a flight recorder kept."""
    recorder = FlightRecorder(4)
    recorder.add(Record("dp", 0, "all_reduce", (4, 2), "float32", "sum", started_s=1.0))
    recorder.add(Record("pp", 3, "send", (2,), "bfloat16", peer=1, tag=7, place="a.py:1"))
    recorder.add(Record("dp", 1, "barrier", finished_s=2.5, error="timed out"))

    def read(data: bytes) -> object:
        records = from_json(data.decode("utf-8", "surrogateescape"))
        return records, [record.describe(3.0) for record in records]

    return Reader(read, [recorder.to_json().encode()], (CollectiveError,))


def layouts() -> Reader:
    """Return the reader of the names of layouts."""
    seeds = [
        b"dp=2,tp=2,pp=2",
        b"dp=4,tp=2,ep=4,etp=1",
        b"dp=8,dp_shard=4,order=dp/pp/cp/tp",
        b"dp=4,dp_shard=2,order=dp_replicate/pp/dp_shard/cp/tp",
    ]

    def read(data: bytes) -> object:
        return MeshShape.parse(data.decode("utf-8", "surrogateescape"))

    return Reader(read, seeds, (ShardingError,))


READERS: dict[str, Callable[[], Reader]] = {
    "schedule table": schedule_tables,
    "schedule action": actions,
    "journal of interventions": journals,
    "metrics.jsonl": metrics,
    "data positions": positions,
    "shard spec": shard_specs,
    "flight records": flights,
    "layout": layouts,
}
