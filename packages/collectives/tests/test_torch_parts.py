"""Parts of the communicator over torch.distributed, without processes."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from trainwright.collectives import (
    CollectiveTimeoutError,
    PeerFailedError,
    TorchCommunicator,
    UsageError,
    failures,
)
from trainwright.collectives.background import Background
from trainwright.collectives.call_log import CallLog
from trainwright.collectives.calls import Call, Kind
from trainwright.collectives.failures import Failure, FailureBoard
from trainwright.collectives.gloo_backend import GlooBackend
from trainwright.collectives.gloo_exit import end_threads
from trainwright.collectives.gloo_questions import Note, Questions
from trainwright.collectives.gloo_tags import Tags
from trainwright.collectives.protocol import Recv, Send
from trainwright.collectives.scratch import Scratch


class Connections:
    is_open = True

    def close(self) -> None:
        self.is_open = False


def test_the_first_failure_is_the_one_that_all_ranks_tell() -> None:
    store = dist.HashStore()
    boards = [FailureBoard(store, rank) for rank in range(3)]
    connections = Connections()
    boards[1].watch(connections)

    first = boards[0].publish(Failure(0, "out of memory"))
    second = boards[1].publish(Failure(1, "lost rank 0"))

    assert first == second == boards[2].read() == Failure(0, "out of memory")
    assert not connections.is_open
    with pytest.raises(PeerFailedError, match="rank 0 failed: out of memory"):
        boards[1].check()
    boards[2].check()


def test_errors_of_a_transport_are_explained_by_what_is_known() -> None:
    store = dist.HashStore()
    board = FailureBoard(store, 4)

    error = RuntimeError("Timed out waiting 5ms")
    told = board.explain(error, "barrier()", "world", [1, 3], progress="it was early")

    assert isinstance(told, TimeoutError)
    assert "rank 4 gave up on barrier() in 'world'; missing: rank 1, rank 3." in str(told)
    assert str(told).endswith("order; it was early")
    later = FailureBoard(store, 5).explain(RuntimeError("closed"), "recv()", "world", [], peer=4)
    assert str(later) == str(told)
    assert later.__notes__ == ["rank 5 was in recv() of 'world'"]


def test_a_lost_connection_is_blamed_on_its_other_end() -> None:
    board = FailureBoard(dist.HashStore(), 4)

    told = board.explain(RuntimeError("reset\nlong story"), "barrier()", "world", [], peer=2)

    assert isinstance(told, PeerFailedError)
    assert (told.rank, told.cause) == (2, "the connection was lost during barrier(): reset")


class Hanging:
    """A store whose process is stopped."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *given: self.is_over.wait(60)


def test_a_store_that_hangs_does_not_keep_a_rank_from_telling_why_it_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failures, "_STORE_S", 0.05)
    store, connections = Hanging(), Connections()
    board = FailureBoard(store, 4)
    board.watch(connections)

    told = board.explain(TimeoutError(), "barrier()", "world", [0])

    store.is_over.set()
    assert "rank 4 gave up on barrier() in 'world'; missing: rank 0." in str(told)
    assert not connections.is_open
    with pytest.raises(CollectiveTimeoutError, match="missing: rank 0"):
        board.check()


def test_scratch_is_used_again_but_never_twice_at_once() -> None:
    scratch = Scratch()
    like = torch.empty(0)
    first = scratch.take((2, 20_000), like)
    second = scratch.take((2, 20_000), like)
    address = first.data_ptr()

    scratch.give_back(first)
    third = scratch.take((4, 10_000), like)
    fourth = scratch.take((2, 20_000), like)

    assert third.data_ptr() == address
    assert third.shape == (4, 10_000)
    assert len({second.data_ptr(), third.data_ptr(), fourth.data_ptr()}) == 3


def test_scratch_keeps_neither_the_small_nor_more_than_its_limit() -> None:
    scratch = Scratch()
    small = torch.empty(10)
    scratch.give_back(small)
    assert scratch.take((10,), small).data_ptr() != small.data_ptr()
    huge = torch.empty(65 << 20, dtype=torch.uint8)
    scratch.give_back(huge)
    assert scratch.take(huge.shape, huge).data_ptr() != huge.data_ptr()


def test_messages_that_do_not_fit_have_different_tags() -> None:
    tags = Tags()
    messages = [
        Send(torch.ones(2, 3), 0, 5),
        Send(torch.ones(3, 2), 0, 5),
        Send(torch.ones(2, 3).int(), 0, 5),
        Send(torch.ones(2, 3), 0, 6),
    ]

    found = [tags.of_message(message) for message in messages]

    assert len(set(found)) == 4
    assert all(0 <= tag < 1 << 30 for tag in found)
    assert tags.of_message(messages[0]) == Tags().of_message(messages[0])


def test_background_steps_run_in_order_until_it_is_stopped() -> None:
    done: list[int] = []
    background = Background("test")
    for number in range(50):
        background.run(lambda number=number: done.append(number))
    all_done = threading.Event()
    background.run(all_done.set)

    assert all_done.wait(10.0)
    assert done == list(range(50))
    background.stop()
    background.stop()


ONE_LOOKS = """
import threading
import torch
from trainwright.collectives import CollectiveTimeoutError, LocalWorld
from trainwright.collectives.background import Bystander

is_over = threading.Event()
bystander = Bystander(target=is_over.wait, args=(30.0,), name="looking")
bystander.start()
try:
    LocalWorld(2, timeout_s=20.0).run(lambda comm: comm.recv(torch.ones(1), 1 - comm.rank).wait())
except CollectiveTimeoutError as error:
    print(error)
finally:
    is_over.set()
    bystander.join()
"""


def test_a_thread_that_only_looks_hides_no_deadlock_of_rank_threads() -> None:
    # In a process of its own: a thread that another test has left might send, for all they know.
    command = [sys.executable, "-c", ONE_LOOKS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "deadlock, every rank waits" in done.stdout, done.stderr


def connected(size: int) -> dict[int, GlooBackend]:
    """Connect some ranks of this process over Gloo."""
    store, notes = dist.HashStore(), dist.HashStore()
    made: dict[int, GlooBackend] = {}

    def make(rank: int) -> None:
        board = FailureBoard(notes, rank)
        made[rank] = GlooBackend(store, rank, range(size), "some", 20.0, board)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


def test_who_waits_for_one_that_is_still_there_is_woken_though_others_have_gone() -> None:
    made = connected(3)
    caught: list[BaseException] = []
    work = made[2].exchange([Recv(torch.empty(1), 1)], None)

    def wait() -> None:
        try:
            work.wait()
        except PeerFailedError as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not work.is_awaited:
        time.sleep(0.01)
    time.sleep(0.05)
    made[0].close()
    time.sleep(0.05)

    made[2].board.publish(Failure(0, "it was told"))
    waiting.join(5.0)

    assert not waiting.is_alive()
    assert [str(error) for error in caught] == ["rank 0 failed: it was told"]


def test_threads_that_wait_for_messages_end_before_the_process_and_blame_nobody() -> None:
    made = connected(2)
    backend = made[0]
    work = backend.exchange([Recv(torch.empty(1), 1)], None)
    assert not work.is_done(0.05)
    watcher = backend.watcher([1])

    end_threads(backend._group, 0, 2, backend.works, backend._background, {(1,): watcher})

    assert watcher.has_ended(0.0)
    assert backend._group == []
    assert backend.board.read() is None


def test_calls_are_compared_by_number_and_each_is_told_once() -> None:
    store = dist.HashStore()
    early, late = Questions(store, 0), Questions(store, 1)
    called = {5: "all_reduce()", 6: "gather()"}

    assert early.ask(5, "all_reduce()") is None
    assert early.ask(6, "scatter()") is None
    assert early.ask(6, "scatter()") is None

    # What has not been called yet is compared later, what is forgotten never.
    assert late.answer({}.get, 5) is None
    assert late.answer({5: called[5]}.get, 6) is None
    assert late.answer(called.get, 7) == (Note(6, 0, "scatter()"), Note(6, 1, "gather()"))
    assert late.answer(called.get, 7) is None
    assert late.ask(5, "broadcast()") == (Note(5, 0, "all_reduce()"), Note(5, 1, "broadcast()"))
    assert Questions(store, 2).answer({}.get, 7) is None


def test_old_notes_make_room_for_new_ones() -> None:
    store = dist.HashStore()
    early, late = Questions(store, 0), Questions(store, 1)

    for number in range(1500):
        early.ask(number, f"call {number}")

    assert early.answer(lambda number: None, 0) is None
    assert len(early._open) == 1024
    assert late.ask(400, "barrier()") is None
    assert late.ask(1400, "call 1400") is None
    assert late.ask(1400 + 1024, "call 2424") is None
    assert late.answer(lambda number: "other", 1500) == (
        Note(477, 0, "call 477"),
        Note(477, 1, "other"),
    )


def test_a_rank_remembers_what_it_has_called() -> None:
    log = CallLog(0)
    tensor = torch.ones(3)
    for kind in (Kind.ALL_TO_ALL, Kind.ALL_REDUCE):
        call = Call(kind, tensor, tensor, (3,), torch.float32)
        log.start(call)
        log.finish(call)

    assert log.recall(0) == "all_to_all(float32[3])"
    assert log.recall(1) == "all_reduce(float32[3])"
    assert log.recall(2) is None


def test_a_process_group_is_needed() -> None:
    with pytest.raises(UsageError, match="init_process_group first, or use SingleCommunicator"):
        TorchCommunicator()


def test_a_rank_knows_how_far_its_peers_have_come_from_what_they_send() -> None:
    log = CallLog(1)
    tensor = torch.ones(3)

    def call(kind: Kind, root: int | None = None, given: torch.Tensor | None = tensor) -> None:
        started = Call(kind, given, given, root=root)
        log.start(started)
        log.finish(started)

    call(Kind.BARRIER, given=None)
    call(Kind.BROADCAST, 2)
    call(Kind.GATHER, 0)
    call(Kind.ALL_TO_ALL)
    call(Kind.ALL_REDUCE, given=torch.ones(0))

    assert [log.last_heard(peer) for peer in (0, 2, 3)] == [0, 1, 0]
    call(Kind.REDUCE, 1)
    assert [log.last_heard(peer) for peer in (0, 2, 3)] == [5, 5, 5]
    assert CallLog(0).tell([1], [4, 7]) == (
        "rank 4 has started 0 collectives of this group and finished 0, "
        "rank 7 was last heard in none"
    )
