"""Loading a plain state: what it sets, how much travels at once, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright.collectives import Box, Communicator, LocalWorld, Work
from trainwright.sharding import (
    Mesh,
    MeshShape,
    ParameterPlacement,
    ShardingError,
    data_parallel,
)
from trainwright.sharding.data.loading import load_full
from trainwright.sharding.data.state_dict import full_state_dict, piece_state_dict
from trainwright.sharding.data.testing import RecordedCall, RecordingCommunicator, wrap


class Tied(nn.Module):
    """An embedding whose weight is the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(4, 2, dtype=torch.float64)
        self.head = nn.Linear(2, 4, bias=False, dtype=torch.float64)
        self.head.weight = self.emb.weight
        with torch.no_grad():
            self.emb.weight.copy_(torch.arange(8.0).view(4, 2).sin())


def test_masters_keep_what_the_weights_dtype_would_round() -> None:
    value = 1.0 + 2.0**-20

    def run(world: Communicator) -> tuple[float, float, float]:
        parallel = wrap(nn.Linear(3, 3, dtype=torch.bfloat16), world, stage=1)
        state = {"weight": torch.full((3, 3), value), "bias": torch.zeros(3)}
        load_full(parallel, state, root=None)
        pieces = piece_state_dict(parallel)
        held = [float(tensor.max()) for name, (tensor, _) in pieces.items() if name == "weight"]
        weight = parallel.module.weight.detach()
        return max(held), float(weight.max()), float(weight.min())

    assert LocalWorld(2).run(run) == [(value, 1.0, 1.0)] * 2


class WithSends(RecordingCommunicator):
    """Records the bytes of messages too."""

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Work:
        self._calls.append(RecordedCall("send", self.name, tensor.nbytes, tensor.dtype))
        return self._inner.send(tensor, peer, tag)


def test_no_more_than_a_block_travels_at_once() -> None:
    def run(world: Communicator) -> list[RecordedCall]:
        calls: list[RecordedCall] = []
        parallel = wrap(nn.Linear(50, 50), WithSends(world, calls), stage=1)
        calls.clear()
        state = full_state_dict(parallel, block_bytes=64)
        load_full(parallel, state or None, block_bytes=64)
        return calls

    results = LocalWorld(2).run(run)

    num_blocks = 2500 * 4 // 64 + 50 * 4 // 64
    for calls in results:
        blocks = [call.numel for call in calls if call.operation == "broadcast"]
        # What the state holds is a text of some hundred bytes.
        assert sum(numel > 64 for numel in blocks) <= 1
        assert blocks.count(64) == num_blocks
    sent = [call.numel for call in results[1] if call.operation == "send"]
    assert sum(numel > 64 for numel in sent) == 1
    assert sent.count(64) == num_blocks // 2
    assert max(call.numel for call in results[0] if call.operation == "send") == 24


def test_a_root_that_cannot_collect_lets_the_others_go() -> None:
    half = ParameterPlacement((4, 2), [Box((0, 0), (2, 2))])

    def run(world: Communicator) -> str:
        mesh = Mesh(world, MeshShape(dp=3))
        parallel = data_parallel(nn.Linear(2, 2, bias=False), mesh, placements={"weight": half})
        with pytest.raises(ShardingError) as caught:
            full_state_dict(parallel)
        return str(caught.value)

    first, *others = LocalWorld(3).run(run)

    assert "weight: the ranks hold 4 elements of shape (4, 2) together" in first
    assert others == ["rank 0 could not collect the state; its error says why"] * 2


WEIGHT = torch.zeros(4, 2, dtype=torch.float64)


@pytest.mark.parametrize("root", [0, 1, None])
@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "the state to load is a NoneType"),
        ({"emb.weight": 3}, "'emb.weight' in the state is a int"),
        ({}, r"the state lacks emb\.weight"),
        ({"emb.wieght": WEIGHT}, r"lacks emb\.weight \(near: emb\.wieght\)"),
        ({"emb.weight": WEIGHT[1:]}, r"shape \(4, 2\) in the model and \(3, 2\) in the state"),
        ({"emb.weight": WEIGHT.long()}, "is torch.float64 in the model and torch.int64"),
        ({"emb.weight": WEIGHT, "bias": WEIGHT}, "does not have bias, which the state holds"),
        ({"emb.weight": WEIGHT, "head.weight": WEIGHT + 1}, "are one parameter .* leave one"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_on_all_ranks_before_anything_changes(
    state: dict[str, object] | None, message: str, root: int | None
) -> None:
    def run(world: Communicator) -> str:
        parallel = wrap(Tied(), world, stage=1)
        mine = state if root in (None, world.rank) else None
        with pytest.raises(ShardingError, match=message) as caught:
            load_full(parallel, mine, root=root)
        assert torch.equal(parallel.module.emb.weight, Tied().emb.weight)
        for tensor in full_state_dict(parallel).values():
            assert torch.equal(tensor, Tied().emb.weight)
        return str(caught.value)

    assert len(set(LocalWorld(2).run(run))) == 1


def test_one_name_of_a_tied_parameter_is_enough() -> None:
    parallel = wrap(Tied())

    load_full(parallel, {"head.weight": WEIGHT})

    assert not parallel.module.emb.weight.any()


def test_ranks_with_different_states_are_refused() -> None:
    def run(world: Communicator) -> None:
        parallel = wrap(Tied(), world)
        state = {"emb.weight" if world.rank else "head.weight": WEIGHT}
        with pytest.raises(ShardingError, match="all ranks must have states of equal names"):
            load_full(parallel, state, root=None)

    LocalWorld(2).run(run)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"root": 1}, r"0\.\.0, got 1"), ({"root": -1}, "got -1"), ({"block_bytes": 0}, "least 1")],
)
def test_roots_and_blocks_are_checked(options: dict[str, int], message: str) -> None:
    parallel = wrap(Tied())

    with pytest.raises(ShardingError, match=message):
        full_state_dict(parallel, **options)
    with pytest.raises(ShardingError, match=message):
        load_full(parallel, {"emb.weight": WEIGHT}, **options)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_nothing_is_loaded_while_one_rank_has_gradients_that_were_not_reduced(stage: int) -> None:
    def run(world: Communicator) -> None:
        parallel = wrap(nn.Linear(3, 3), world, stage=stage)
        before = {name: tensor.clone() for name, (tensor, _) in piece_state_dict(parallel).items()}
        if world.rank == 1:
            parallel.module(torch.ones(1, 3)).sum().backward()
        state = {"weight": torch.zeros(3, 3), "bias": torch.zeros(3)}
        with pytest.raises(ShardingError, match="with gradients that were not reduced"):
            load_full(parallel, state, root=None)
        for name, (tensor, _) in piece_state_dict(parallel).items():
            assert torch.equal(tensor, before[name])
        parallel.zero_grad(discard=True)
        load_full(parallel, state, root=None)
        assert not any(tensor.any() for tensor, _ in piece_state_dict(parallel).values())

    LocalWorld(2).run(run)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_parameter_that_came_later_is_named_and_not_left_out(stage: int) -> None:
    def run(world: Communicator) -> None:
        parallel = wrap(nn.Linear(3, 3), world, stage=stage)
        parallel.module.register_parameter("late", nn.Parameter(torch.zeros(2)))
        with pytest.raises(ShardingError, match="late was added or renamed after data_parallel"):
            full_state_dict(parallel)

    LocalWorld(2).run(run)
