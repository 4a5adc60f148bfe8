"""All ranks gather units in one order, whichever of them each rank runs, and in whichever order."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import Communicator, LocalWorld, PeerFailedError
from trainwright.sharding.data import LifecycleError
from trainwright.sharding.data.hooks import HookDriver
from trainwright.sharding.data.order import GatherOrderWarning
from trainwright.sharding.data.passes import Pass, insert_unused, merge_orders, usual_order
from trainwright.sharding.data.testing import RecordedCall, RecordingCommunicator
from trainwright.sharding.data.testing_units import counting_units

F64 = torch.float64


class Route(nn.Module):
    """Runs the blocks that it is told to, in the order that it is told."""

    def __init__(self, depth: int = 4, *, root: bool = True) -> None:
        super().__init__()
        if root:
            self.scale = nn.Parameter(torch.ones(3, dtype=F64))
        self.blocks = nn.ModuleList(nn.Linear(3, 3, dtype=F64) for _ in range(depth))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=F64))

    def forward(self, hidden: torch.Tensor, route: Sequence[int]) -> torch.Tensor:
        if hasattr(self, "scale"):
            hidden = hidden * self.scale
        for index in route:
            hidden = hidden + torch.tanh(self.blocks[index](hidden))
        return hidden


def names_of(depth: int) -> list[str]:
    return ["", *(f"blocks.{index}" for index in range(depth))]


def inputs_of(step: int) -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(step), dtype=F64)


def train_on_routes(
    comm: Communicator, routes: Sequence[Sequence[Sequence[int]]], depth: int = 4, **options: Any
) -> list[list[str]]:
    """Train on ``routes[step][rank]``, compare with a plain model, return each step's gathers."""
    plain, model = Route(depth), Route(depth)
    units, tally = counting_units(model, names_of(depth), comm)
    driver = HookDriver(units, model, comm, **options)
    gathered = []
    for step, ranks in enumerate(routes):
        for trained in (plain, model):
            trained.zero_grad()
            trained(inputs_of(step), ranks[comm.rank]).square().sum().backward()
        driver.finish()
        assert not tally.live
        if options.get("release_after_forward", True):
            assert tally.most_live <= options.get("live_units", 2) + 1
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=0)
        gathered.append(list(tally.gathered))
        tally.gathered.clear()
    return gathered


def routes_in_order(depth: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, depth - 1), unique=True).map(sorted)


@settings(max_examples=12)
@given(st.data())
def test_ranks_may_skip_different_units_in_each_step(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    keep = data.draw(st.booleans())
    live_units = data.draw(st.integers(1, 3))
    routes = data.draw(
        st.lists(
            st.lists(routes_in_order(4), min_size=ranks, max_size=ranks), min_size=3, max_size=3
        )
    )
    results = LocalWorld(ranks).run(
        lambda comm: train_on_routes(
            comm, routes, release_after_forward=not keep, live_units=live_units
        )
    )

    assert all(result == results[0] for result in results)
    used = {unit for route in routes[0] for unit in route}
    assert len(results[0][0]) == (1 + len(used)) * (1 if keep else 2)
    if ranks > 1:
        for gathered in results[0][1:]:
            assert len(gathered) == (5 if keep else 10)


@settings(max_examples=8)
@given(order=st.permutations(range(4)), data=st.data())
def test_units_may_run_in_another_order_than_they_are_registered(
    order: list[int], data: st.DataObject
) -> None:
    whole = [list(order)] * 3
    parts = data.draw(
        st.lists(
            st.lists(st.sets(st.integers(0, 3)), min_size=3, max_size=3), min_size=2, max_size=2
        )
    )
    skipping = [[[i for i in order if i in part] for part in ranks] for ranks in parts]
    routes = [whole, *skipping, whole]

    results = LocalWorld(3).run(lambda comm: train_on_routes(comm, routes))

    names = [f"blocks.{index}" for index in order]
    for gathered in results:
        assert gathered == [["", *names, "", *names[::-1]]] * 4


def test_after_the_first_step_only_a_number_a_step_is_sent_besides_weights() -> None:
    def run(comm: Communicator) -> list[int]:
        calls: list[RecordedCall] = []
        model = Route()
        units, _ = counting_units(model, names_of(4), comm)
        driver = HookDriver(units, model, RecordingCommunicator(comm, calls))
        counts = []
        for step in range(3):
            model(inputs_of(step), range(4)).sum().backward()
            driver.finish()
            with torch.no_grad():
                model(inputs_of(step), range(4))
            counts.append(len(calls))
            calls.clear()
        return counts

    # Each pass of the first step: one agreement a unit and one on its end.
    assert LocalWorld(2).run(run) == [[3 * 6 + 1, 1, 1]] * 2
    assert LocalWorld(1).run(run) == [[0, 0, 0]]


def test_conflicting_orders_give_right_results_and_one_warning() -> None:
    routes = [[[0, 1, 2, 3], [0, 2, 1, 3]]] * 3
    with pytest.warns(GatherOrderWarning) as seen:
        results = LocalWorld(2).run(lambda comm: train_on_routes(comm, routes))

    assert results[0] == results[1]
    assert len(seen) == 2  # one for the forward, one for the backward
    text = str(seen[0].message)
    assert "rank 0: '', 'blocks.0', 'blocks.1', 'blocks.2', 'blocks.3'; rank 1: ''" in text
    assert "gather 'blocks.1' more often" in text or "gather 'blocks.2' more often" in text


class Outer(nn.Module):
    """Runs the others inside of its own forward, or lets them run after it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=F64)

    def forward(self, hidden: torch.Tensor, *inner: nn.Module) -> torch.Tensor:
        for module in inner:
            hidden = torch.tanh(module(hidden))
        return torch.tanh(self.linear(hidden))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer = Outer()
        self.blocks = nn.ModuleList(nn.Linear(3, 3, dtype=F64) for _ in range(2))

    def forward(self, hidden: torch.Tensor, nested: bool) -> torch.Tensor:
        first, second = self.blocks
        if nested:
            return self.outer(hidden, first, second)
        return second(self.outer(first(self.outer(hidden))))


def test_a_rank_joins_the_gather_of_a_unit_that_it_is_using() -> None:
    state = Nested().state_dict()

    def run(comm: Communicator) -> list[str]:
        plain, model = Nested(), Nested()
        plain.load_state_dict(state)
        model.load_state_dict(state)
        units, tally = counting_units(model, ["outer", "blocks.0", "blocks.1"], comm)
        driver = HookDriver(units, model, comm)
        for step in range(3):
            tally.gathered.clear()
            for trained in (plain, model):
                trained.zero_grad()
                trained(inputs_of(step), comm.rank == 0).square().sum().backward()
            driver.finish()
            for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=0)
        return tally.gathered

    with pytest.warns(GatherOrderWarning, match="'blocks.1' more often"):  # in the backward
        first, second = LocalWorld(2, timeout_s=10).run(run)

    assert first == second
    assert first[:4] == ["outer", "blocks.0", "outer", "blocks.1"]


def test_a_unit_that_is_not_ahead_is_refused_on_all_ranks() -> None:
    def run(comm: Communicator) -> object:
        routes = [[[0, 1, 2, 3]] * 2, [[0, 1, 2, 3], [1, 0, 2, 3]]]
        with pytest.raises((LifecycleError, PeerFailedError)) as caught:
            train_on_routes(comm, routes)
        if comm.rank == 1:
            assert isinstance(caught.value, LifecycleError)
        return str(caught.value)

    with pytest.raises((LifecycleError, PeerFailedError)) as caught:
        LocalWorld(2).run(run)

    assert "unit 'blocks.0'" in str(caught.value)
    assert "'', 'blocks.0', 'blocks.1', 'blocks.2', 'blocks.3'" in str(caught.value)
    assert "relearn_order()" in str(caught.value)


def test_one_rank_alone_may_change_its_order() -> None:
    routes = [[[0, 1, 2, 3]], [[3, 1, 1, 0]], [[2, 2, 3]]]

    LocalWorld(1).run(lambda comm: train_on_routes(comm, routes))


def test_an_order_can_be_learned_again_in_each_step() -> None:
    def run(comm: Communicator) -> None:
        plain, model = Route(), Route()
        units, _ = counting_units(model, names_of(4), comm)
        driver = HookDriver(units, model, comm)
        for step, route in enumerate([[0, 1, 2, 3], [3, 3, 1], [2, 0]]):
            for trained in (plain, model):
                trained(inputs_of(step), route).sum().backward()
            driver.finish()
            driver.relearn_order()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=0)

    LocalWorld(2).run(run)


def test_ranks_in_passes_of_different_kinds_are_told_so() -> None:
    def run(comm: Communicator) -> None:
        model = Route()
        units, _ = counting_units(model, names_of(4), comm)
        HookDriver(units, model, comm)
        with torch.set_grad_enabled(comm.rank == 0):
            model(inputs_of(0), range(4))

    with pytest.raises(
        LifecycleError, match="rank 0 a forward with gradients, rank 1 a forward without gradients"
    ):
        LocalWorld(2).run(run)


def test_ranks_that_run_passes_in_different_orders_are_told_before_anything_is_reduced() -> None:
    def run(comm: Communicator) -> str:
        model = Route()
        units, _ = counting_units(model, names_of(4), comm)
        driver = HookDriver(units, model, comm)
        model(inputs_of(0), range(4)).sum().backward()
        driver.finish()
        losses = [model(inputs_of(0), range(4)).sum()]
        if comm.rank == 0:
            losses.pop().backward()
        losses.append(model(inputs_of(1), range(4)).sum())
        for loss in losses:
            loss.backward()
        with pytest.raises(LifecycleError) as caught:
            driver.finish()
        driver.reset()
        model(inputs_of(0), range(4)).sum().backward()
        driver.finish()
        return str(caught.value)

    first, second = LocalWorld(2).run(run)

    assert "ranks gathered different weights in this step" in first
    assert "forward with gradients, forward with gradients, backward, backward" in second


@pytest.mark.parametrize("keep", [False, True])
def test_a_rank_may_leave_out_its_last_backward(keep: bool) -> None:
    def run(comm: Communicator) -> None:
        model = Route()
        units, tally = counting_units(model, names_of(4), comm)
        driver = HookDriver(units, model, comm, release_after_forward=not keep)
        for step in range(4):
            losses = [model(inputs_of(step), range(4)).sum() for _ in range(2)]
            losses[0].backward()
            if (step + comm.rank) % 2:
                losses[1].backward()
            driver.finish()
            assert not tally.live
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert not parameter.grad.isnan().any()

    LocalWorld(2).run(run)


def test_a_rank_may_leave_out_the_backward_in_which_others_learn_their_order() -> None:
    def run(comm: Communicator) -> None:
        plain, model = Route(), Route()
        units, _ = counting_units(model, names_of(4), comm)
        driver = HookDriver(units, model, comm)
        for step in range(3):
            route = [0, 3] if step == 0 and comm.rank == 0 else range(4)
            for trained in (plain, model):
                loss = trained(inputs_of(step), route).sum()
                if step > 0 or comm.rank == 0:
                    loss.backward()
            driver.finish()
            for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=0)

    LocalWorld(2).run(run)


def test_forwards_without_backward_are_reported() -> None:
    def run(comm: Communicator) -> None:
        model = Route()
        units, _ = counting_units(model, names_of(4), comm)
        driver = HookDriver(units, model, comm)
        for _ in range(3):
            model(inputs_of(0), range(4))
        driver.begin_step()
        driver.finish()
        for _ in range(3):
            model(inputs_of(0), range(4))
        driver.finish()

    with pytest.warns(GatherOrderWarning, match=r"3 forwards .* under no_grad"):
        LocalWorld(1).run(run)


@given(st.lists(st.lists(st.integers(0, 4), max_size=6), min_size=1, max_size=4))
def test_a_merged_order_serves_each_rank(orders: list[list[int]]) -> None:
    merged = merge_orders(orders, range(5))

    if merged is None:
        assert len(orders) > 1
    else:
        for order in orders:
            rest = iter(merged)
            assert all(unit in rest for unit in order)
        for unit in range(5):
            assert merged.count(unit) == max(order.count(unit) for order in orders)


def test_units_that_nobody_used_come_where_they_usually_do() -> None:
    # Units: a root, one in it with two inside, one beside it.
    parents = [None, 0, 1, 1, 0]

    forward = usual_order(Pass.FORWARD, parents, None)
    backward = usual_order(Pass.BACKWARD, parents, None)
    other_way = usual_order(Pass.BACKWARD, parents, [0, 4, 1, 3, 2])

    assert forward == [0, 1, 2, 3, 4]
    assert backward == [0, 4, 1, 3, 2]
    assert other_way == [0, 1, 2, 3, 4]
    assert insert_unused([0, 1, 3], forward, {2, 4}) == (0, 1, 2, 3, 4)
    assert insert_unused([0, 1, 2], backward, {3, 4}) == (0, 4, 1, 3, 2)
    assert insert_unused([3], backward, {0}) == (0, 3)
    # The root's output is that of unit 4, whose backward is announced first.
    assert insert_unused([4, 0, 2], backward, {1, 3}) == (4, 0, 1, 3, 2)


def test_submodules_may_be_called_without_the_root() -> None:
    def run(comm: Communicator) -> None:
        plain, model = Route(root=False), Route(root=False)
        units, tally = counting_units(model, names_of(4)[1:], comm)
        driver = HookDriver(units, model, comm)
        for step in range(3):
            for trained in (plain, model):
                with torch.no_grad():
                    for _ in range(step + 1):  # as a decoder is called for each token
                        for block in (trained.blocks[1], trained.blocks[2]):
                            block(inputs_of(step))
                hidden = inputs_of(step)
                for index, block in enumerate(trained.blocks):
                    if (index + step + comm.rank) % 3:
                        hidden = torch.tanh(block(hidden))
                hidden.sum().backward()
            driver.finish()
            assert not tally.live
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LocalWorld(2).run(run)


def test_after_the_end_of_a_pass_units_may_be_gathered_by_others() -> None:
    def run(comm: Communicator) -> list[str]:
        model = Route(root=False)
        units, tally = counting_units(model, names_of(4)[1:], comm)
        driver = HookDriver(units, model, comm)
        for step in range(2):
            with torch.no_grad():
                for index in range(3):
                    if step == 0 or index != comm.rank:
                        model.blocks[index](inputs_of(step))
            driver.end_pass()
            for unit in units:
                unit.gather()
            for unit in units:
                unit.await_weights()
                assert not any(parameter.isnan().any() for parameter in unit.module.parameters())
                unit.release()
        return tally.gathered

    first, second = LocalWorld(2, timeout_s=10).run(run)

    assert first == second
