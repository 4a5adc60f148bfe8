"""A recorded communicator counts, remembers, and tells who called what."""

import json
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.collectives import (
    CollectiveTimeoutError,
    Communicator,
    LocalWorld,
    PeerFailedError,
    Recv,
    ReduceOp,
    Send,
    SingleCommunicator,
    UsageError,
    Work,
    algorithms,
    direct,
)
from trainwright.collectives.calls import Call, Kind
from trainwright.collectives.flight import FlightRecorder, Record, from_json
from trainwright.collectives.headers import name_ranks
from trainwright.collectives.histories import first_difference, tell_flight
from trainwright.collectives.recorded import Recorded
from trainwright.collectives.scratch import Scratch
from trainwright.collectives.stopping import stopping_peers
from trainwright.collectives.testing import COMMUNICATOR_LAWS, Law, some_cases
from trainwright.collectives.testing.laws_of_messages import works_tell_whether_they_are_done
from trainwright.collectives.traffic import Flow, Traffic, elements_sent
from trainwright.collectives.works import DONE

# What compares before it starts waits for those who have not come.
NOT_VERIFIED = {works_tell_whether_they_are_done}


@pytest.mark.parametrize("law", COMMUNICATOR_LAWS, ids=lambda law: law.__name__)
def test_a_recorded_communicator_obeys_all_laws(law: Law) -> None:
    def obey(comm: Communicator) -> None:
        recorded = Recorded(comm, verify=law not in NOT_VERIFIED)
        for case in some_cases()[3::25]:
            law(recorded, case)

    LocalWorld(3).run(obey)


# Counting


@settings(max_examples=15)
@given(size=st.integers(2, 5), rows=st.integers(0, 7), root=st.integers(0, 4))
def test_a_collective_sends_what_the_direct_exchange_in_two_rounds_sends(
    size: int, rows: int, root: int
) -> None:
    root %= size
    large = 60_000 * size + rows
    divisible = 60_000 * size
    for kind in Kind:
        if kind in (Kind.BARRIER, Kind.SPLIT):
            continue
        is_whole = kind in (Kind.ALL_REDUCE, Kind.REDUCE, Kind.BROADCAST)
        numel = large if is_whole else divisible
        for rank in range(size):
            call = make_call(kind, numel, root, size)
            plan = direct.plan(call, rank, size, Scratch())
            late = [] if plan.between is None else plan.between()
            sent = sum(part.numel() for _, part in [*plan.sends, *late])
            assert elements_sent(kind.value, numel, rank, size, root) == sent


def make_call(kind: Kind, numel: int, root: int, size: int) -> Call:
    whole = torch.zeros(numel)
    part = torch.zeros(numel // size)
    output, given = whole, whole
    if kind in (Kind.ALL_GATHER, Kind.GATHER):
        given = part
    elif kind in (Kind.REDUCE_SCATTER, Kind.SCATTER):
        output = part
    elif kind is Kind.ALL_TO_ALL:
        output = torch.zeros(numel)
    call = Call(kind, output, given, (), torch.float32, ReduceOp.SUM, torch.float32, root)
    call.output_splits = call.input_splits = [numel // size] * size
    return call


def test_traffic_between_two_moments_is_their_difference() -> None:
    def count(comm: Communicator) -> Traffic:
        recorded = Recorded(comm)
        recorded.all_reduce(torch.ones(5)).wait()
        before = recorded.traffic
        recorded.all_gather(torch.empty(6, dtype=torch.int16), torch.ones(2).short()).wait()
        peers = [rank for rank in range(3) if rank != comm.rank]
        sends = [Send(torch.ones(4), peer) for peer in peers]
        recorded.exchange([*sends, *(Recv(torch.empty(4), peer) for peer in peers)]).wait()
        recorded.barrier()
        return recorded.traffic - before

    assert (
        LocalWorld(3).run(count)
        == [
            Traffic(
                {
                    "all_gather": Flow(1, 0, 2, 6, 4, 4, 12, 8),
                    "exchange": Flow(1, 2, 8, 8, 8, 32, 32, 32),
                    "barrier": Flow(1),
                }
            )
        ]
        * 3
    )


def test_all_ranks_together_send_what_the_formulas_say() -> None:
    def count(comm: Communicator) -> Traffic:
        recorded = Recorded(comm)
        large, part = torch.ones(12), torch.ones(3)
        recorded.all_reduce(large).wait()
        recorded.reduce_scatter(part, large).wait()
        recorded.all_to_all(torch.empty(12), large).wait()
        recorded.gather(large if comm.rank == 1 else None, part, 1).wait()
        recorded.scatter(part, large if comm.rank == 1 else None, 1).wait()
        recorded.reduce(large, 2).wait()
        recorded.broadcast(large, 2).wait()
        return recorded.traffic

    total = sum(LocalWorld(4).run(count), Traffic())

    sent = {kind: total[kind].elements_sent for kind in total}
    assert sent == {
        "all_reduce": 2 * 3 * 12,
        "reduce_scatter": 3 * 12,
        "all_to_all": 3 * 12,
        "gather": 9,
        "scatter": 9,
        "reduce": 3 * 12 + 9,
        "broadcast": 9 + 3 * 9,
    }
    assert (total["gather"].elements_in, total["gather"].elements_out) == (12, 12)
    assert (total["broadcast"].elements_in, total["broadcast"].elements_out) == (12, 36)
    assert (total["reduce"].elements_in, total["reduce"].elements_out) == (48, 12)


def test_uneven_parts_are_counted_as_they_are() -> None:
    def count(comm: Communicator) -> Flow:
        recorded = Recorded(comm)
        splits = [[1, 2], [0, 3]][comm.rank]
        incoming = [[1, 0], [2, 3]][comm.rank]
        output = torch.empty(sum(incoming), 2)
        recorded.all_to_all(output, torch.ones(3, 2), incoming, splits).wait()
        return recorded.traffic.total

    assert LocalWorld(2).run(count) == [
        Flow(1, 0, 6, 2, 4, 24, 8, 16),
        Flow(1, 0, 6, 10, 0, 24, 40, 0),
    ]


def test_traffic_prints_as_a_table() -> None:
    traffic = Traffic({"all_reduce": Flow(1, 0, 1000, 1000, 1500, 4000, 4000, 6000)})

    lines = str(traffic).splitlines()

    assert lines[0].split() == [
        "operations",
        "messages",
        "in",
        "out",
        "sent",
        "bytes",
        "in",
        "bytes",
        "out",
        "bytes",
        "sent",
    ]
    assert lines[1].split() == [
        "all_reduce",
        "1",
        "0",
        "1,000",
        "1,000",
        "1,500",
        "4,000",
        "4,000",
        "6,000",
    ]
    assert lines[2].startswith("total")
    assert len({len(line) for line in lines}) == 1


# Remembering


SOUND = {"group": "dp", "number": 0, "kind": "barrier", "shape": None}


@pytest.mark.parametrize(
    "text",
    [
        *("", "7", "[7]", "[[]]", "[{}]", "[" * 100_000),
        *(
            json.dumps([{**SOUND, **change}])
            for change in (
                {"shape": 7},
                {"shape": ["a"]},
                {"more": 1},
                {"op": 5},
                {"error": 5},
                {"finished_s": {}},
                {"started_s": "now"},
                {"group": None},
                {"peer": True},
            )
        ),
    ],
    ids=lambda text: text[-40:],
)
def test_what_no_recorder_wrote_is_refused(text: str) -> None:
    assert from_json(json.dumps([SOUND]))[0].describe(1.0).startswith("barrier #0")
    with pytest.raises(UsageError, match="these are no records of a flight recorder"):
        from_json(text)


def test_the_recorder_tells_what_was_called_where_and_what_became_of_it() -> None:
    def record(comm: Communicator) -> list[str]:
        recorded = Recorded(comm, recorder=FlightRecorder(4))
        recorded.barrier()
        recorded.all_reduce(torch.ones(2, 3), ReduceOp.MAX).wait()
        recorded.all_reduce(torch.ones(2).half(), reduce_dtype=torch.float64).wait()
        recorded.broadcast(torch.ones(()), 1)
        if comm.rank:
            recorded.recv(torch.empty(2), 0, 7).wait()
        else:
            recorded.send(torch.empty(2), 1, 7).wait()
        assert recorded.recorder.num_forgotten == 1
        assert from_json(recorded.recorder.to_json()) == recorded.recorder.records()
        assert json.loads(recorded.recorder.to_json())[0]["shape"] == [2, 3]
        return recorded.recorder.dump().splitlines()

    for rank, lines in enumerate(LocalWorld(2).run(record)):
        message = ("send #0 (2,) float32 to rank 1", "recv #0 (2,) float32 from rank 0")[rank]
        expected = (
            "all_reduce #1 (2, 3) float32 MAX",
            "all_reduce #2 (2,) float16 SUM reduce_dtype=float64",
            "broadcast #3 () float32 root=1",
            f"{message} tag=7",
        )
        for line, start in zip(lines, expected, strict=True):
            assert line.startswith(f"{start} at test_recorded.py:")
            state = "not finished" if "broadcast" in line else "in 'world': finished after"
            assert state in line


def test_parts_record_to_the_recorder_of_the_whole() -> None:
    def record(comm: Communicator) -> list[str]:
        recorded = Recorded(comm, verify=True)
        part = recorded.split(comm.rank % 2)
        assert part is not None
        part.all_reduce(torch.ones(1)).wait()
        nobody = recorded.split(None)
        assert nobody is None
        assert part.traffic["all_reduce"].operations == 1
        assert recorded.traffic["all_reduce"].operations == 0
        return [f"{call.kind} {call.group}" for call in recorded.recorder.records()]

    calls = LocalWorld(4).run(record)[1]

    assert [call.split()[0] for call in calls] == ["split", "all_reduce", "split"]
    assert calls[1].split()[1] not in calls[0]


def test_errors_tell_the_last_operations_of_their_rank() -> None:
    def fail(comm: Communicator) -> None:
        recorded = Recorded(comm)
        recorded.all_reduce(torch.ones(3)).wait()
        if comm.rank == 1:
            recorded.abort(ValueError("no more data"))
        recorded.barrier()

    with pytest.raises(PeerFailedError, match="rank 1 failed: ValueError: no more data") as told:
        LocalWorld(2).run(fail)
    assert any("was in barrier" in note for note in told.value.__notes__)

    recorded = Recorded(SingleCommunicator())
    recorded.all_reduce(torch.ones(3)).wait()
    recorded.abort("tired")
    with pytest.raises(PeerFailedError, match="tired") as caught:
        recorded.broadcast(torch.ones(3), 0)
    assert "rank 0 was in broadcast at test_recorded.py:" in caught.value.__notes__[0]
    assert "all_reduce #0 (3,) float32 SUM at test_recorded.py:" in caught.value.__notes__[0]


# Comparing


def caught_by_all(size: int, differ: Callable[[Recorded], object]) -> list[str]:
    """Return the messages of the UsageErrors that ``differ(recorded)`` raises on each rank."""

    def run(comm: Communicator) -> str:
        recorded = Recorded(comm, verify=True)
        recorded.all_reduce(torch.ones(5)).wait()
        with pytest.raises(UsageError) as caught:
            differ(recorded)
        tensor = torch.ones(5)
        recorded.all_reduce(tensor).wait()
        assert tensor.tolist() == [size] * 5
        return str(caught.value)

    return list(LocalWorld(size).run(run))


MISMATCHES = {
    "operation": (
        lambda comm: comm.all_gather(torch.empty(16, 8), torch.empty(4, 8)).wait(),
        r"rank 3 all_gather #1 \(4, 8\) float32 at test_recorded.py:\d+; "
        r"ranks 0-2 reduce_scatter #1 \(4, 8\) float32 SUM at test_recorded.py:\d+",
    ),
    "shape": (
        lambda comm: comm.reduce_scatter(torch.empty(5, 8), torch.empty(20, 8)).wait(),
        r"rank 3 reduce_scatter #1 \(5, 8\) .*; ranks 0-2 reduce_scatter #1 \(4, 8\) ",
    ),
    "dtype": (
        lambda comm: comm.reduce_scatter(
            torch.empty(4, 8).half(), torch.empty(16, 8).half()
        ).wait(),
        "rank 3 .*float16 SUM .*; ranks 0-2 .*float32 SUM",
    ),
    "op": (
        lambda comm: comm.reduce_scatter(
            torch.empty(4, 8), torch.empty(16, 8), ReduceOp.MAX
        ).wait(),
        "rank 3 .*float32 MAX .*; ranks 0-2 .*float32 SUM",
    ),
    "barrier": (lambda comm: comm.barrier(), r"rank 3 barrier #1 at .*; ranks 0-2 reduce_scatter"),
    "split": (lambda comm: comm.split(0), r"rank 3 split #1 at .*; ranks 0-2 reduce_scatter"),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_every_rank_is_told_who_called_what_and_where(what: str) -> None:
    other, expected = MISMATCHES[what]

    def differ(comm: Recorded) -> None:
        if comm.rank == 3:
            other(comm)
        else:
            comm.reduce_scatter(torch.empty(4, 8), torch.empty(16, 8)).wait()

    start = time.monotonic()
    messages = caught_by_all(4, differ)

    assert time.monotonic() - start < 5.0
    assert len(set(messages)) == 1
    assert re.search(expected, messages[0]), messages[0]


def test_another_order_is_told_as_well() -> None:
    def differ(comm: Recorded) -> None:
        tensors = [torch.ones(2), torch.ones(3)]
        works = [comm.all_reduce(t) for t in (tensors if comm.rank else reversed(tensors))]
        for work in reversed(works):
            work.wait()

    messages = caught_by_all(2, differ)

    assert len(set(messages)) == 1
    assert "rank 0 all_reduce #1 (3,)" in messages[0]
    assert "rank 1 all_reduce #1 (2,)" in messages[0]


def test_operations_are_compared_before_anybody_waits_for_them() -> None:
    messages = caught_by_all(2, lambda comm: comm.broadcast(torch.ones(2), comm.rank))

    assert "rank 0 broadcast #1 (2,) float32 root=0" in messages[0]
    assert "rank 1 broadcast #1 (2,) float32 root=1" in messages[0]


def test_nothing_has_moved_where_ranks_differ() -> None:
    tensors = [torch.full((3,), float(rank)) for rank in range(3)]

    def differ(comm: Recorded) -> None:
        root = comm.rank // 2
        with comm.coalesce() as work:
            comm.broadcast(tensors[comm.rank], 1)
            with pytest.raises(UsageError):
                comm.broadcast(tensors[comm.rank], root)
        work.wait()

    caught_by_all(3, differ)

    assert [tensor.tolist() for tensor in tensors] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]


@pytest.mark.parametrize(
    "mistake",
    [
        lambda comm: comm.all_gather(torch.empty(7), torch.empty(2)),
        lambda comm: comm.barrier(timeout_s=-1.0),
        lambda comm: comm.split("red"),
        lambda comm: comm.all_gather(torch.empty(6), torch.empty(2), timeout_s=0.0),
        lambda comm: comm.all_gather(torch.empty(6), torch.empty(2), timeout_s="x"),
        lambda comm: comm.barrier(timeout_s="x"),
        lambda comm: comm.all_to_all(torch.empty(3), torch.empty(3), "abc"),
        lambda comm: comm.reduce(torch.empty(3), torch.zeros(2)),
    ],
    ids=["all_gather", "barrier", "split", "timeout", "no time", "never", "no splits", "no root"],
)
def test_a_mistake_of_one_rank_is_told_by_all(mistake: Callable[[Recorded], object]) -> None:
    def differ(comm: Recorded) -> None:
        if comm.rank == 1:
            mistake(comm)
        else:
            comm.all_gather(torch.empty(6), torch.empty(2))

    messages = caught_by_all(3, differ)

    assert len(set(messages)) == 1
    assert re.search(r"rank 1 \w+ #1 at test_rec.*, which raised UsageError: ", messages[0])
    assert "ranks 0, 2 all_gather #1 (2,) float32 at test_recorded.py" in messages[0]


def test_comparing_costs_16_bytes_a_collective() -> None:
    def run(comm: Communicator) -> Traffic:
        counted = Recorded(comm.split(0, comm.rank))
        recorded = Recorded(comm, verify=counted)
        before = counted.traffic
        for _ in range(3):
            recorded.all_reduce(torch.ones(1000)).wait()
        return counted.traffic - before

    assert {flow.bytes_in for flow in LocalWorld(2).run(run) for flow in [flow.total]} == {3 * 16}


def test_the_usual_reduce_dtype_may_be_named_or_not() -> None:
    def run(comm: Communicator) -> None:
        recorded = Recorded(comm, verify=True)
        tensor = torch.ones(2).bfloat16()
        recorded.all_reduce(tensor, reduce_dtype=torch.float32 if comm.rank else None).wait()
        recorded.check()

    LocalWorld(2).run(run)


def test_those_who_do_not_come_are_named_with_what_they_did_last() -> None:
    def run(comm: Communicator) -> str | None:
        recorded = Recorded(comm, verify=True)
        recorded.all_reduce(torch.ones(5)).wait()
        if comm.rank in (1, 3):
            return None
        with pytest.raises(CollectiveTimeoutError) as caught:
            recorded.barrier(timeout_s=0.2)
        return str(caught.value)

    messages = LocalWorld(4).run(run)

    for rank, message in enumerate(messages):
        if rank in (0, 2):
            assert f"rank {rank} of 'world' gave up on barrier #1 at test_recorded.py" in message
            assert "missing: rank 1, rank 3; " in message
            assert "all ranks came to all_reduce #0 (5,) float32 SUM at test_recorded" in message


def test_messages_that_differ_between_their_ends_are_told() -> None:
    def run(comm: Communicator) -> None:
        recorded = Recorded(comm, verify=True)
        if comm.rank == 0:
            recorded.send(torch.ones(3, 2), 1, 5)
        elif comm.rank == 1:
            recorded.recv(torch.empty(2, 3), 0, 5).wait()
        # Those who know nothing of the message are stopped as well.
        comm.barrier()

    with pytest.raises(UsageError) as caught:
        LocalWorld(3).run(run)

    told = str(caught.value)
    assert "rank 0 send #0 (3, 2) float32 to rank 1 tag=5 at test_recorded.py:" in told
    assert "rank 1 recv #0 (2, 3) float32 from rank 0 tag=5 at test_recorded.py:" in told


def test_parts_of_other_sizes_than_expected_are_told() -> None:
    def run(comm: Recorded) -> None:
        incoming = [1, 1] if comm.rank else [1, 2]
        comm.all_to_all(torch.empty(sum(incoming), 4), torch.ones(2, 4), incoming, [1, 1])

    expected = r"all_to_all #1 \(4,\) float32: rank 1 sends 1 rows to rank 0, which expects 2; "
    assert all(re.search(expected, message) for message in caught_by_all(2, run))


Program = list[tuple[str, int]]


def start(comm: Communicator, kind: str, rows: int) -> Work:
    part = torch.ones(rows, 2)
    whole = torch.ones(rows * comm.size, 2)
    operations: dict[str, Callable[[], Work]] = {
        "all_reduce": lambda: comm.all_reduce(part),
        "reduce": lambda: comm.reduce(part, 1),
        "broadcast": lambda: comm.broadcast(part, 0),
        "all_gather": lambda: comm.all_gather(whole, part),
        "reduce_scatter": lambda: comm.reduce_scatter(part, whole),
        "all_to_all": lambda: comm.all_to_all(whole, whole.clone()),
    }
    return operations[kind]()


calls = st.tuples(
    st.sampled_from(
        ["all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"]
    ),
    st.integers(0, 3),
)


@settings(max_examples=10)
@given(
    program=st.lists(calls, min_size=1, max_size=6),
    other=calls,
    place=st.integers(0, 5),
    culprit=st.integers(0, 2),
    is_patient=st.booleans(),
)
def test_wherever_one_rank_departs_from_the_program_all_are_told_the_same(
    program: Program, other: tuple[str, int], place: int, culprit: int, is_patient: bool
) -> None:
    place %= len(program)
    rows_are_told = other[0] == "all_to_all" == program[place][0]
    if other == program[place] or rows_are_told:
        other = ("barrier", 0)

    def perform(recorded: Recorded) -> None:
        works = []
        for number, (kind, rows) in enumerate(program):
            if number == place and recorded.rank == culprit:
                kind, rows = other
            if kind == "barrier":
                recorded.barrier()
                continue
            works.append(start(recorded, kind, rows))
            if not is_patient:
                works[-1].wait()
        for work in reversed(works):
            work.wait()

    messages = caught_by_all(3, perform)

    assert len(set(messages)) == 1
    assert f"rank {culprit} {other[0]} #{place + 1} " in messages[0]
    others = name_ranks({0, 1, 2} - {culprit})
    assert f"{others} {program[place][0]} #{place + 1} " in messages[0]


def test_a_message_that_never_comes_is_told_with_its_sender() -> None:
    def run(comm: Communicator) -> str | None:
        recorded = Recorded(comm, verify=True)
        if comm.rank == 1:
            return None
        with pytest.raises(CollectiveTimeoutError) as caught:
            recorded.recv(torch.empty(4), 1, 2, timeout_s=0.2).wait()
        return str(caught.value)

    told = LocalWorld(2).run(run)[0]

    assert "rank 0 of 'world' gave up on recv #0 (4,) float32 from rank 1 tag=2 at " in told
    assert "missing: rank 1, which has not sent" in told


def test_rings_send_what_their_formula_says() -> None:
    def run(comm: Communicator) -> Flow:
        recorded = Recorded(comm, verify=True)
        tensor = torch.arange(12.0)
        algorithms.ring_all_reduce(recorded, tensor)
        assert torch.equal(tensor, torch.arange(12.0) * 4)
        return recorded.traffic.total

    flows = LocalWorld(4).run(run)

    assert {flow.elements_sent for flow in flows} == {2 * 3 * 3}
    assert {flow.messages for flow in flows} == {6}


def test_a_rank_that_raises_stops_its_peers_with_the_cause() -> None:
    single = SingleCommunicator()

    with pytest.raises(KeyError), stopping_peers(single):
        raise KeyError("weights")

    with pytest.raises(PeerFailedError, match="rank 0 failed: KeyError: 'weights'"):
        single.barrier()
    with stopping_peers(SingleCommunicator()) as nothing:
        assert nothing is None


def test_the_records_of_all_ranks_tell_where_a_run_hangs() -> None:
    def call(number: int, kind: str, finished_s: float | None = 1.0, group: str = "dp") -> Record:
        return Record(group, number, kind, place="layer.py:40", finished_s=finished_s)

    told = tell_flight(
        {
            0: [call(0, "all_reduce"), call(1, "barrier", None)],
            1: [call(0, "all_reduce"), call(0, "reduce", None, "tp")],
        }
    )

    assert told.splitlines() == [
        "'dp': differs: rank 0 barrier #1 at layer.py:40; rank 1 called nothing as #1",
        "  rank 0: last finished all_reduce #0 at layer.py:40; not finished barrier #1 at "
        "layer.py:40",
        "  rank 1: last finished all_reduce #0 at layer.py:40; nothing open",
        "'tp': the same on all ranks",
        "  rank 1: nothing finished; not finished reduce #0 at layer.py:40",
    ]


class Careless:
    """Lets ranks call what they like, as some transports do."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def __getattr__(self, name: str) -> object:
        return getattr(self.comm, name)

    def all_reduce(self, tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Work:
        is_theirs = tensor.is_floating_point()
        return DONE if is_theirs else self.comm.all_reduce(tensor, *arguments, **keywords)


def test_what_was_called_so_far_is_compared_on_demand() -> None:
    def run(comm: Communicator) -> str:
        recorded = Recorded(Careless(comm))
        for size in range(4):
            recorded.all_reduce(torch.ones(size))
        recorded.check()
        for size in (3, 9, 4) if comm.rank == 1 else (3, 4, 9):
            recorded.all_reduce(torch.ones(size))
        with pytest.raises(UsageError) as caught:
            recorded.check()
        return str(caught.value)

    messages = LocalWorld(3).run(run)

    assert len(set(messages)) == 1
    assert "rank 1 all_reduce #5 (9,) float32 SUM at test_recorded.py" in messages[0]
    assert "ranks 0, 2 all_reduce #5 (4,) float32 SUM at test_recorded.py" in messages[0]


@pytest.mark.parametrize("is_coalesced", [False, True])
def test_calls_that_differ_and_pass_are_told_in_debug_after_a_while(is_coalesced: bool) -> None:
    def run(comm: Communicator) -> tuple[int, str]:
        recorded = Recorded(Careless(comm))
        with recorded.coalesce() if is_coalesced else nullcontext():
            for _ in range(65):
                recorded.all_reduce(torch.ones(2))
        for number in range(65, 300):
            op = ReduceOp.MAX if (comm.rank, number) == (1, 70) else ReduceOp.SUM
            try:
                recorded.all_reduce(torch.ones(2), op)
            except UsageError as error:
                return number, str(error)
        return 300, ""

    for number, told in LocalWorld(3).run(run):
        assert number == 192
        assert "rank 1 all_reduce #70 (2,) float32 MAX at test_recorded.py" in told
        assert "ranks 0, 2 all_reduce #70 (2,) float32 SUM at test_recorded.py" in told


@pytest.mark.parametrize("length", [1, 3, 150])
def test_ranks_may_coalesce_each_as_it_likes_while_they_are_compared(length: int) -> None:
    def run(comm: Communicator) -> list[float]:
        recorded = Recorded(comm)
        sums = [torch.ones(1) for _ in range(300)]
        works = []
        for start in range(0, 300, length):
            with recorded.coalesce() if recorded.rank == 0 else nullcontext():
                works += [recorded.all_reduce(tensor) for tensor in sums[start : start + length]]
            for work in works:
                work.wait()
        return [tensor.item() for tensor in sums]

    assert LocalWorld(2, timeout_s=20.0).run(run) == [[2.0] * 300] * 2


def test_differences_are_told_by_all_once_no_rank_is_in_a_block() -> None:
    def run(comm: Communicator) -> tuple[int, str]:
        recorded = Recorded(Careless(comm))
        for number in range(300):
            op = ReduceOp.MAX if (comm.rank, number) == (1, 70) else ReduceOp.SUM
            is_coalesced = comm.rank == 0 and 100 < number < 200
            try:
                with recorded.coalesce() if is_coalesced else nullcontext():
                    recorded.all_reduce(torch.ones(2), op)
            except UsageError as error:
                return number, str(error)
        return 300, ""

    (number, told), *others = LocalWorld(3, timeout_s=20.0).run(run)

    assert others == [(number, told)] * 2
    assert number == 256
    assert "rank 1 all_reduce #70 (2,) float32 MAX" in told


def test_a_block_that_an_error_ends_takes_its_comparison_along() -> None:
    def fail_inside(recorded: Recorded) -> None:
        with recorded.coalesce():
            for _ in range(70):
                recorded.all_reduce(torch.ones(1))
            raise ZeroDivisionError

    def run(comm: Communicator) -> None:
        recorded = Recorded(comm)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                fail_inside(recorded)
            for _ in range(70):
                recorded.all_reduce(torch.ones(1)).wait()

    LocalWorld(2, timeout_s=20.0).run(run)


def test_what_is_not_to_be_compared_is_not() -> None:
    def run(comm: Communicator) -> None:
        recorded = Recorded(Careless(comm), verify=False)
        for number in range(200):
            recorded.all_reduce(torch.ones(1 + comm.rank * number))

    LocalWorld(2).run(run)


def test_a_rank_that_has_called_less_is_told_by_its_count() -> None:
    def run(comm: Communicator) -> None:
        recorded = Recorded(Careless(comm), recorder=FlightRecorder(2))
        for _ in range(3 + comm.rank):
            recorded.all_reduce(torch.ones(1))
        recorded.check()

    with pytest.raises(UsageError, match="rank 0 called nothing as #3; rank 1 all_reduce #3"):
        LocalWorld(2).run(run)


def test_recorded_operations_of_all_ranks_are_compared_afterwards() -> None:
    def call(number: int, kind: str) -> Record:
        return Record("world", number, kind, place="layer.py:40")

    same = [call(0, "barrier"), call(1, "all_reduce")]

    assert first_difference({0: same, 1: same}) is None
    assert first_difference({0: same, 1: [same[0], call(1, "reduce")], 2: same}) == (
        "rank 1 reduce #1 at layer.py:40; ranks 0, 2 all_reduce #1 at layer.py:40"
    )


def test_a_verifier_of_other_ranks_is_refused() -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(UsageError, match="pass a communicator of the same ranks"):
            Recorded(comm, verify=SingleCommunicator())
        with pytest.raises(UsageError, match="capacity=0 must be a number of at least 1"):
            FlightRecorder(0)

    LocalWorld(2).run(run)
