"""Ranks as threads: what reaches the caller, who is stopped, and what is left behind."""

import contextvars
import signal
import threading
import time

import pytest
import torch

from trainwright.collectives import (
    CollectiveTimeoutError,
    Communicator,
    LocalWorld,
    PeerFailedError,
    Recv,
    ReduceOp,
    Send,
    UsageError,
    Work,
)


def num_rank_threads() -> int:
    return sum(thread.name.startswith("rank ") for thread in threading.enumerate())


def finish(work: object) -> None:
    if isinstance(work, Work):
        work.wait()


def test_results_stand_in_the_order_of_the_ranks() -> None:
    assert LocalWorld(64).run(lambda comm, base: base + comm.rank, 100) == list(range(100, 164))


def test_an_error_reaches_the_caller_as_it_was_with_its_rank() -> None:
    error = KeyError("lost")

    def fail(comm: Communicator) -> None:
        if comm.rank == 2:
            raise error
        comm.barrier()

    with pytest.raises(KeyError) as caught:
        LocalWorld(4).run(fail)

    assert caught.value is error
    assert caught.value.__notes__ == ["on rank 2"]
    assert num_rank_threads() == 0


def test_every_further_error_is_mentioned() -> None:
    def fail(comm: Communicator) -> None:
        try:
            if comm.rank == 0:
                raise ValueError("first")
            comm.barrier()
        except PeerFailedError:
            raise TypeError("while cleaning up") from None

    with pytest.raises(ValueError, match="first") as caught:
        LocalWorld(2).run(fail)

    assert caught.value.__notes__[1] == "rank 1 failed as well: TypeError: while cleaning up"


@pytest.mark.parametrize("blocked_in", ["barrier", "recv", "send", "split", "later"])
def test_peers_of_a_failed_rank_stop_within_a_second(blocked_in: str) -> None:
    seen: list[PeerFailedError] = []

    def fail(comm: Communicator) -> None:
        if comm.rank == 1:
            time.sleep(0.05)
            raise ValueError("gone")
        try:
            tensor = torch.ones(1)
            if blocked_in == "barrier":
                comm.barrier()
            elif blocked_in == "recv":
                comm.recv(tensor, 1).wait()
            elif blocked_in == "send":
                comm.send(tensor, 1).wait()
            elif blocked_in == "split":
                comm.split(0)
            else:
                time.sleep(0.2)
                comm.all_reduce(tensor)
        except PeerFailedError as error:
            seen.append(error)
            raise

    start = time.monotonic()
    with pytest.raises(ValueError, match="gone"):
        LocalWorld(3).run(fail)

    assert time.monotonic() - start < 1.0
    assert [(error.rank, error.cause) for error in seen] == [(1, "ValueError: gone")] * 2


def test_a_peer_that_computes_on_is_stopped_too() -> None:
    def fail(comm: Communicator) -> None:
        if comm.rank == 0:
            raise ValueError("gone")
        while True:
            try:
                comm.barrier()
            except PeerFailedError:
                continue

    with pytest.raises(ValueError, match="gone"):
        LocalWorld(2).run(fail)

    assert num_rank_threads() == 0


def test_an_abort_stops_the_world_also_from_a_part_of_it() -> None:
    def give_up(comm: Communicator) -> str:
        part = comm.split(comm.rank % 2)
        assert part is not None
        if comm.rank == 3:
            part.abort("enough")
        with pytest.raises(PeerFailedError, match="rank 3 failed: enough"):
            comm.barrier()
        return "still here"

    with pytest.raises(PeerFailedError, match="rank 3 failed: enough"):
        LocalWorld(4).run(give_up)


def test_an_interrupt_of_the_caller_stops_the_ranks() -> None:
    def interrupt(comm: Communicator) -> None:
        if comm.rank == 0:
            # A real signal: interrupt_main() does not wake who is blocked already.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            comm.recv(torch.ones(1), 1).wait()
        while True:
            time.sleep(0.01)

    # Shells let what runs in the background ignore it.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            LocalWorld(2).run(interrupt)
    finally:
        signal.signal(signal.SIGINT, handler)

    assert time.monotonic() - start < 5.0
    assert num_rank_threads() == 0


def test_a_deadlock_is_noticed_at_once_with_who_is_missing_and_all_stacks() -> None:
    def skip(comm: Communicator) -> None:
        comm.barrier()
        if comm.rank in (0, 2):
            comm.all_reduce(torch.ones(3)).wait()
        elif comm.rank == 1:
            comm.recv(torch.ones(1), 3).wait()
        else:
            time.sleep(0.1)

    start = time.monotonic()
    with pytest.raises(CollectiveTimeoutError) as caught:
        LocalWorld(4, timeout_s=60.0).run(skip)

    text = str(caught.value)
    assert time.monotonic() - start < 5.0
    for rank in (0, 2):
        assert (
            f"rank {rank} waits in collective 1 of 'world', all_reduce(float32[3], SUM); "
            "missing: rank 1, rank 3"
        ) in text
    assert "rank 1 waits in recv(float32[1], tag=0) from rank 3" in text
    assert "collectives started by each rank: [2, 1, 2, 1], finished: [1, 1, 1, 1]" in text
    assert "stack of rank 0" in text
    assert "comm.recv(torch.ones(1), 3).wait()" in text
    assert "stack of rank 3: has ended" in text


def test_a_timeout_counts_where_someone_else_could_still_come() -> None:
    release = threading.Event()

    def wait(comm: Communicator) -> None:
        if comm.rank == 1:
            release.wait()
            return
        try:
            comm.recv(torch.ones(1), 1, tag=4, timeout_s=0.1).wait()
        finally:
            release.set()

    with pytest.raises(CollectiveTimeoutError, match=r"recv.*tag=4.*rank 1 did not send") as caught:
        LocalWorld(2).run(wait)

    assert "rank 0 gave up after 0.1 s" in str(caught.value)
    assert "release.wait()" in str(caught.value)


def test_a_thread_of_the_caller_may_still_break_what_looks_like_a_deadlock() -> None:
    def send_from_another_thread(comm: Communicator) -> float:
        tensor = torch.zeros(1)
        if comm.rank == 0:

            def send_late() -> None:
                time.sleep(0.1)
                comm.send(torch.ones(1), 1).wait()

            thread = threading.Thread(target=send_late)
            thread.start()
            comm.recv(tensor, 1).wait()
            thread.join()
        else:
            comm.recv(tensor, 0).wait()
            comm.send(tensor + 1, 0).wait()
        return tensor.item()

    assert LocalWorld(2).run(send_from_another_thread) == [2.0, 1.0]


def test_a_rank_may_go_on_after_a_timeout() -> None:
    def try_twice(comm: Communicator) -> float:
        tensor = torch.full((1,), float(comm.rank))
        if comm.rank == 0:
            with pytest.raises(CollectiveTimeoutError):
                comm.recv(torch.ones(1), 1, tag=1, timeout_s=0.05).wait()
            comm.send(tensor + 5, 1).wait()
        else:
            comm.recv(tensor, 0).wait()
        return tensor.item()

    assert LocalWorld(2).run(try_twice) == [0.0, 5.0]


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        (lambda comm: comm.all_reduce(torch.ones(3)), r"all_reduce\(float32\[3\], SUM\)"),
        (lambda comm: comm.all_reduce(torch.ones(2).double()), r"all_reduce\(float64\[2\], SUM\)"),
        (lambda comm: comm.all_reduce(torch.ones(2), ReduceOp.MAX), "MAX"),
        (lambda comm: comm.broadcast(torch.ones(2), 0), r"broadcast\(float32\[2\], root=0\)"),
        (
            lambda comm: comm.all_reduce(torch.ones(2), reduce_dtype=torch.float64),
            "reduce_dtype=float64",
        ),
        (lambda comm: comm.barrier(), r"barrier\(\)"),
        (lambda comm: comm.split(0), r"split\(\)"),
    ],
)
def test_different_calls_raise_on_every_rank_naming_who_called_what(odd, says: str) -> None:
    errors: list[str] = []

    def differ(comm: Communicator) -> None:
        mine = torch.ones(2)
        with pytest.raises(UsageError) as caught:
            finish(odd(comm) if comm.rank == 1 else comm.all_reduce(mine))
        errors.append(str(caught.value))
        assert mine.tolist() == [1.0, 1.0]
        tensor = torch.ones(1)
        comm.all_reduce(tensor).wait()
        assert tensor.item() == 3

    LocalWorld(3).run(differ)

    assert len(errors) == 3
    for text in errors:
        assert "rank 1 called" in text
        assert "called all_reduce(float32[2], SUM)" in text
    assert any(says.replace("\\", "") in text for text in errors)


def test_different_roots_are_a_mistake() -> None:
    def differ(comm: Communicator) -> None:
        with pytest.raises(UsageError, match="root=1"):
            comm.broadcast(torch.ones(2), comm.rank).wait()

    LocalWorld(2).run(differ)


def test_messages_that_do_not_fit_raise_on_both_sides() -> None:
    def differ(comm: Communicator) -> None:
        mine = torch.ones(2, 3) if comm.rank == 0 else torch.ones(3, 2)
        message = Send(mine, 1) if comm.rank == 0 else Recv(mine, 0)
        with pytest.raises(UsageError, match=r"sends float32\[2, 3\].*receives into float32\[3, 2"):
            comm.exchange([message]).wait()

    LocalWorld(2).run(differ)


def test_splits_that_do_not_match_raise_on_every_rank() -> None:
    def differ(comm: Communicator) -> None:
        outputs = [1, 1] if comm.rank == 0 else [2, 1]
        inputs = [1, 1]
        with pytest.raises(UsageError, match="rank 0 sends 1 rows to rank 1, which expects 2"):
            comm.all_to_all(torch.ones(sum(outputs)), torch.ones(2), outputs, inputs).wait()

    LocalWorld(2).run(differ)


def test_sends_wait_for_their_receives_unless_buffers_are_asked_for() -> None:
    def send_first(comm: Communicator) -> float:
        came = torch.zeros(1)
        comm.send(torch.ones(1) * comm.rank, 1 - comm.rank).wait()
        comm.recv(came, 1 - comm.rank).wait()
        return came.item()

    with pytest.raises(CollectiveTimeoutError, match="did not receive"):
        LocalWorld(2).run(send_first)
    assert LocalWorld(2, buffered_sends=True).run(send_first) == [1.0, 0.0]


def test_a_buffered_send_keeps_the_values_it_was_given() -> None:
    def send(comm: Communicator) -> list[float]:
        tensor = torch.tensor([1.0, 2.0])
        if comm.rank == 0:
            comm.send(tensor, 1).wait()
            tensor.zero_()
            comm.barrier()
        else:
            comm.barrier()
            tensor.zero_()
            comm.recv(tensor, 0).wait()
        return tensor.tolist()

    assert LocalWorld(2, buffered_sends=True).run(send) == [[0.0, 0.0], [1.0, 2.0]]


def test_settings_of_the_caller_are_as_before() -> None:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    inside: list[int] = []
    try:
        LocalWorld(3).run(lambda comm: inside.append(torch.get_num_threads()))
        outside = [torch.get_num_threads()]
        thread = threading.Thread(target=lambda: outside.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(num_threads)

    assert inside == [1, 1, 1]
    assert outside == [2, 2]


def test_backward_runs_in_the_thread_of_the_rank() -> None:
    def differentiate(comm: Communicator) -> bool:
        names = []
        weight = torch.ones(2, requires_grad=True)
        weight.register_hook(lambda grad: names.append(threading.current_thread().name))
        (weight * 2).sum().backward()
        # On CPU that is so anyway; on CUDA this setting makes it so.
        assert not torch._C._is_multithreading_enabled()
        return names == [f"rank {comm.rank}"]

    assert all(LocalWorld(4).run(differentiate))


def test_context_variables_of_the_caller_are_seen() -> None:
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(7)

    assert LocalWorld(2).run(lambda comm: variable.get()) == [7, 7]


def test_worlds_nest_and_are_used_again() -> None:
    world = LocalWorld(2)

    def outer(comm: Communicator) -> list[int]:
        return world.run(lambda inner: 10 * comm.rank + inner.rank)

    assert world.run(outer) == [[0, 1], [10, 11]]
    assert world.run(outer) == [[0, 1], [10, 11]]


def test_large_and_small_tensors_add_to_the_same_bits() -> None:
    torch.manual_seed(3)
    terms = torch.randn(5, 200_000)

    def add(comm: Communicator) -> torch.Tensor:
        whole = terms[comm.rank].clone()
        pieces = whole.clone()
        comm.all_reduce(whole).wait()
        for piece in pieces.split(1_000):
            comm.all_reduce(piece).wait()
        assert torch.equal(whole, pieces)
        return whole

    expected = terms[0] + terms[1] + terms[2] + terms[3] + terms[4]
    for result in LocalWorld(5).run(add):
        assert torch.equal(result, expected)


def test_bad_sizes_and_timeouts_are_refused() -> None:
    with pytest.raises(UsageError, match="size=0 must be a positive number"):
        LocalWorld(0)
    with pytest.raises(UsageError, match="timeout_s=0 must be positive"):
        LocalWorld(2, timeout_s=0)
