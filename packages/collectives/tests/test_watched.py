"""Memory that an operation has under way is nobody else's until it has been waited for."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.collectives import (
    LocalWorld,
    Recorded,
    ReduceOp,
    SingleCommunicator,
    UsageError,
)
from trainwright.collectives.buckets import GradientBuckets
from trainwright.collectives.buffer_watch import share_memory
from trainwright.collectives.errors import BufferInFlightError
from trainwright.collectives.protocol import Recv, Send
from trainwright.collectives.testing import COMMUNICATOR_LAWS, LAWS_ABOUT_SHAPES, some_cases
from trainwright.collectives.watched import Watched


@pytest.mark.parametrize("law", COMMUNICATOR_LAWS, ids=lambda law: law.__name__)
def test_a_watched_communicator_obeys_all_laws(law):
    def obey(comm):
        with Watched(comm) as watched:
            for case in some_cases()[:: 9 if law in LAWS_ABOUT_SHAPES else 40]:
                law(watched, case)

    LocalWorld(3).run(obey)


TOUCHES = {
    "reads": lambda t: t + 1,
    "compares": lambda t: torch.equal(t, t),
    "copies": lambda t: t.clone(),
    "writes": lambda t: t.zero_(),
    "writes a view": lambda t: t[1:].view(-1).mul_(2),
    "writes as one of many": lambda t: torch._foreach_mul_([torch.ones(2), t], 2.0),
    "writes as an output": lambda t: torch.add(torch.ones(4), 1, out=t),
    "takes an item": lambda t: t[0].item(),
    "sends it again": lambda t: SingleCommunicator().all_gather(torch.empty(4), t),
}


@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES.keys())
def test_every_way_of_touching_what_is_written_raises_until_it_is_waited_for(touch):
    def body(comm):
        with Watched(comm) as watched:
            tensor = torch.ones(4)
            work = watched.all_reduce(tensor)
            work.is_done()
            with pytest.raises(
                BufferInFlightError, match=r"float32\[4\] that all_reduce at test_w"
            ):
                touch(tensor)
            work.wait()
            touch(tensor)

    LocalWorld(2).run(body)


def test_what_touches_nothing_or_other_memory_is_free():
    def body(comm):
        with Watched(comm) as watched:
            whole = torch.zeros(4, 3)
            work = watched.all_reduce(whole[:, 1])
            whole[:, 2] += 1
            whole[:, 0].fill_(2)
            view = whole.view(-1)[1::3].detach()
            assert view.shape == torch.empty_like(view).shape == view.new_zeros(4).shape
            with pytest.raises(BufferInFlightError):
                whole.sum()
            work.wait()
            return whole.sum().item()

    assert LocalWorld(2).run(body) == [12.0] * 2


def test_what_is_only_sent_may_be_read_but_not_written():
    def body(comm):
        with Watched(comm) as watched:
            given, taken, whole = torch.ones(2), torch.zeros(2), torch.zeros(4)
            peer = 1 - comm.rank
            works = [
                watched.broadcast(given if comm.rank == 0 else torch.ones(2), 0),
                watched.exchange([Send(given, peer), Recv(taken, peer)]),
                watched.all_gather(whole, given),
            ]
            assert given.sum() == 2
            for tensor in (taken, whole):
                with pytest.raises(BufferInFlightError, match="reads memory"):
                    tensor.sum()
            for work in works:
                with pytest.raises(BufferInFlightError, match="writes memory"):
                    given.add_(1)
                work.wait()
            return given.add_(1).tolist(), taken.tolist(), whole.tolist()

    assert LocalWorld(2).run(body)[0] == ([2.0, 2.0], [1.0, 1.0], [1.0] * 4)


def test_a_dropped_work_and_an_open_block_keep_their_memory_and_its_work_gives_it_back():
    def body(comm):
        with Watched(comm) as watched:
            dropped, first, second = torch.ones(1), torch.ones(1), torch.ones(1)
            watched.all_reduce(dropped)
            with watched.coalesce() as work:
                watched.all_reduce(first)
                watched.all_reduce(second)
                with pytest.raises(BufferInFlightError):
                    first.sum()
            part = watched.split(0)
            inside = part.all_reduce(third := torch.ones(1))
            for tensor in (dropped, first, second, third):
                with pytest.raises(BufferInFlightError):
                    tensor.sum()
            work.wait()
            inside.wait()
            assert (first + second + third).item() == 6
            with pytest.raises(BufferInFlightError):
                dropped.sum()

    LocalWorld(2).run(body)


def test_a_block_that_fails_owns_nothing_and_one_that_is_refused_inside_ends_nothing():
    def body(comm):
        with Watched(comm) as watched:
            tensor = torch.ones(1)
            with contextlib.suppress(ZeroDivisionError), watched.coalesce():
                watched.all_reduce(tensor)
                raise ZeroDivisionError
            with pytest.raises(UsageError, match="different operations"):
                Recorded(watched, verify=True).all_reduce(
                    tensor, ReduceOp.MAX if comm.rank else ReduceOp.MIN
                )
            tensor += 1
            with watched.coalesce() as work:
                with pytest.raises(UsageError), watched.coalesce():
                    pass
                watched.all_reduce(tensor)
            work.wait()
            return tensor.item()

    assert LocalWorld(2).run(body) == [4.0] * 2


def test_gradients_are_reduced_under_watch_and_a_backward_into_a_buffer_raises():
    def body(comm):
        weight = torch.nn.Parameter(torch.ones(3))
        with Watched(comm) as watched:
            buckets = GradientBuckets([("weight", weight)], watched)
            for _ in range(2):
                weight.grad = None
                (weight * (comm.rank + 1)).sum().backward()
                buckets.finish()
            buckets.remove()
            work = watched.all_reduce(weight.grad)
            with pytest.raises(BufferInFlightError, match=r"aten\.add"):
                weight.sum().backward()
            work.wait()
        return weight.grad.tolist()

    assert LocalWorld(2).run(body) == [[3.0] * 3] * 2


@settings(max_examples=30)
@given(
    views=st.tuples(
        *[
            st.tuples(
                st.integers(0, 20),
                st.integers(1, 4),
                st.integers(1, 4),
                st.integers(0, 6),
                st.integers(1, 6),
            )
        ]
        * 2
    )
)
def test_views_share_memory_exactly_where_they_have_an_element_in_common(views):
    memory = torch.zeros(80, dtype=torch.int16)
    places = torch.arange(80)

    a, b = (
        ((rows, columns), (by_row, by_column), at) for at, rows, columns, by_row, by_column in views
    )

    common = set(places.as_strided(*a).flatten().tolist()) & set(
        places.as_strided(*b).flatten().tolist()
    )
    assert share_memory(memory.as_strided(*a), memory.as_strided(*b)) == bool(common)
