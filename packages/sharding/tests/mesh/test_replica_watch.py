"""The watch over replicas: it names the first tensor that differs, and costs nothing when off."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from trainwright.collectives import Communicator, LocalWorld, differentiable, random
from trainwright.sharding import (
    ColumnParallelLinear,
    Mesh,
    MeshShape,
    ParameterPlacement,
    Partial,
    ReplicaMismatchError,
    RowParallelLinear,
    ShardingError,
)
from trainwright.sharding.data import ShardPolicy, data_parallel
from trainwright.sharding.data.testing import RecordingCommunicator
from trainwright.sharding.placement import ReplicaWatch, mark_partial

TP = MeshShape(tp=2)
OUTPUTS = {"norm": ["tp"], "down": ["tp"], "drop": ["tp"], "": ["tp"]}


class Block(nn.Module):
    """A block whose parts can be exchanged for faulty ones."""

    def __init__(self, tp: Communicator) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = ColumnParallelLinear(4, 8, tp)
        self.down = RowParallelLinear(8, 4, tp, bias=True)
        self.drop = nn.Identity()
        self.up.reset_parameters(random.Key(0, "up"), 0.5)
        self.down.reset_parameters(random.Key(0, "down"), 0.5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.drop(self.down(torch.tanh(self.up(self.norm(hidden)))))


def rows() -> torch.Tensor:
    return torch.linspace(-1, 1, 12).view(3, 4).square().requires_grad_()


def watched(
    change: Callable[[Block, Mesh], None] = lambda block, mesh: None,
    use: Callable[[Block, Mesh], None] = lambda block, mesh: block(rows()).sum().backward(),
    shape: MeshShape = TP,
) -> list[str]:
    """Return what each rank is told of a block with a change."""

    def run(world: Communicator) -> str:
        mesh = Mesh(world, shape)
        block = Block(mesh.communicator("tp"))
        change(block, mesh)
        try:
            with ReplicaWatch(block, mesh, outputs=OUTPUTS):
                use(block, mesh)
        except ReplicaMismatchError as error:
            return str(error)
        return "equal"

    return LocalWorld(shape.world_size).run(run)


class ByRank(nn.Module):
    """A dropout that draws by rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mask = torch.ones_like(hidden)
        mask[self.rank, 0] = 0
        return hidden * mask


class Unreduced(nn.Module):
    """A row-parallel layer that forgets its reduction."""

    def __init__(self, layer: RowParallelLinear) -> None:
        super().__init__()
        self.layers = [layer]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, self.layers[0].weight)


def test_a_right_block_is_equal_everywhere() -> None:
    assert watched() == ["equal"] * 2
    assert watched(shape=MeshShape(dp=2, tp=2)) == ["equal"] * 4
    assert watched(shape=MeshShape(dp=2)) == ["equal"] * 2


def test_a_dropout_that_draws_by_rank_is_named_and_not_what_follows_it() -> None:
    told = watched(lambda block, mesh: setattr(block, "drop", ByRank(mesh.coordinate("tp"))))

    assert told[0] == told[1]
    assert told[0].startswith(
        "output of drop is declared replicated on tp, but these differ: ranks 0; ranks 1. "
    )


def test_a_missing_reduction_is_named_by_the_module_that_should_have_made_it() -> None:
    told = watched(
        lambda block, mesh: setattr(block, "down", Unreduced(block.down)),
        shape=MeshShape(pp=2, tp=2),
    )

    assert [text.split(".")[0] for text in told] == [
        "output of down is declared replicated on tp, but these differ: "
        f"ranks {first}; ranks {first + 1}"
        for first in (0, 0, 2, 2)
    ]


def test_a_missing_sum_of_an_activations_gradient_is_named_before_what_it_spoils() -> None:
    def forget(block: Block, mesh: Mesh) -> None:
        block.up.input_is_entered = True  # although nobody has entered it

    told = watched(forget)

    assert all(text.startswith("the gradient of output of norm is declared") for text in told)
    assert all("name the module in partial_gradients" in text for text in told)


def test_a_replica_that_drifted_is_named_before_its_output() -> None:
    def drift(block: Block, mesh: Mesh) -> None:
        with torch.no_grad():
            block.norm.bias[1] += 1e-3 * mesh.rank

    assert all(text.startswith("norm.bias is declared replicated on tp") for text in watched(drift))


def test_what_differs_first_is_named_whatever_axes_it_is_replicated_on() -> None:
    def run(world: Communicator) -> str:
        mesh = Mesh(world, MeshShape(dp=2, tp=2))
        model = nn.Sequential(ByRank(mesh.coordinate("tp")), nn.LayerNorm(4))
        with torch.no_grad():
            model[1].weight += world.rank  # on dp and tp, but used after the dropout
        with pytest.raises(ReplicaMismatchError) as caught:
            with ReplicaWatch(model, mesh, axes=["dp", "tp"], outputs={"0": ["tp"]}):
                model(rows())
        return str(caught.value)

    assert all(text.startswith("output of 0 is") for text in LocalWorld(4).run(run))


def test_a_gradient_that_should_have_been_declared_partial_is_named() -> None:
    def run(world: Communicator, gradient: dict[str, Partial]) -> str:
        mesh = Mesh(world, MeshShape(tp=2))
        norm = nn.LayerNorm(4)
        placements = {
            name: ParameterPlacement.replicated((4,), gradient) for name in ("weight", "bias")
        }
        part = rows().chunk(2)[mesh.rank]  # each rank has other positions
        try:
            with ReplicaWatch(norm, mesh, placements=placements):
                norm(part).square().sum().backward()
        except ReplicaMismatchError as error:
            return str(error)
        return "equal"

    forgotten = LocalWorld(2).run(run, {})

    assert all(text.startswith("the gradient of ") for text in forgotten)
    assert all("gradient={axis: Partial()}" in text for text in forgotten)
    assert LocalWorld(2).run(run, {"tp": Partial()}) == ["equal"] * 2


def test_a_partial_gradient_is_not_compared_where_it_is_declared() -> None:
    class Enter(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return differentiable.replicate_to_partial(hidden, self.tp)

    def run(world: Communicator, partial: list[str]) -> str:
        mesh = Mesh(world, MeshShape(tp=2))
        enter = Enter()
        enter.tp = mesh.communicator("tp")
        try:
            with ReplicaWatch(enter, mesh, outputs={"": ["tp"]}, partial_gradients=partial):
                (enter(rows()) * (mesh.rank + 1)).sum().backward()
        except ReplicaMismatchError as error:
            return str(error).split(" is declared")[0]
        return "equal"

    assert LocalWorld(2).run(run, [""]) == ["equal"] * 2
    assert LocalWorld(2).run(run, []) == ["the gradient of output of the model"] * 2


def test_ranks_that_run_other_modules_are_told_instead_of_waiting_for_each_other() -> None:
    def use(block: Block, mesh: Mesh) -> None:
        hidden = block.norm(rows())
        if mesh.rank == 0:
            block.drop(hidden)
        hidden.sum().backward()

    told = watched(use=use)

    assert "after 3 equal tensors, rank 0 goes on with output of drop" in told[0]
    assert "after 3 equal tensors, rank 1 goes on with the gradient of output of norm" in told[1]


def test_a_difference_before_ranks_part_is_what_is_named() -> None:
    def use(block: Block, mesh: Mesh) -> None:
        hidden = block.norm(rows() * (mesh.rank + torch.arange(4)))
        if mesh.rank == 0:
            block.drop(hidden)

    assert all(text.startswith("output of norm is declared") for text in watched(use=use))


def test_inputs_are_compared_where_they_are_declared() -> None:
    def run(world: Communicator) -> str:
        mesh = Mesh(world, MeshShape(tp=2))
        block = Block(mesh.communicator("tp"))
        with pytest.raises(ReplicaMismatchError) as caught:
            with ReplicaWatch(block, mesh, axes=[], inputs={"": ["tp"]}, outputs=OUTPUTS):
                block(rows() + world.rank)
        return str(caught.value)

    assert all(text.startswith("input[0] of the model is") for text in LocalWorld(2).run(run))


def test_nothing_is_sent_before_the_end_of_the_block_and_nothing_is_left_after_it() -> None:
    def run(world: Communicator) -> tuple[list[int], int]:
        calls: list[object] = []
        mesh = Mesh(RecordingCommunicator(world, calls), MeshShape(tp=2))
        block = Block(mesh.communicator("tp"))
        counts = []
        watch = ReplicaWatch(block, mesh, outputs=OUTPUTS)
        block(rows()).sum().backward()
        counts.append(len(calls))
        with watch:
            loss = block(rows()).sum()
            loss.backward(retain_graph=True)
            counts.append(len(calls))
        counts.append(len(calls))
        block(rows()).sum().backward()
        loss.backward()
        counts.append(len(calls))
        hooks = [m._forward_hooks | m._forward_pre_hooks for m in block.modules()]
        hooks += [p._backward_hooks or {} for p in block.parameters()]
        return counts, sum(map(len, hooks))

    # One all-reduce forward and one backward a pass; at the end of the block two of the watch.
    assert LocalWorld(2).run(run) == [([2, 4, 6, 9], 0)] * 2


def test_a_block_can_be_checked_midway_and_watched_again() -> None:
    def run(world: Communicator) -> None:
        mesh = Mesh(world, MeshShape(tp=2))
        block = Block(mesh.communicator("tp"))
        watch = ReplicaWatch(block, mesh, outputs=OUTPUTS)
        with watch:
            block(rows())
            watch.check()
            with torch.no_grad():
                block.down.bias += world.rank  # as a wrong optimizer step would
            with pytest.raises(ReplicaMismatchError, match=r"^down\.bias"):
                watch.check()
            with torch.no_grad():
                block.down.bias.zero_()
            block(rows())
        with torch.no_grad():
            block.norm.weight += world.rank
        with pytest.raises(ReplicaMismatchError, match=r"^norm\.weight"):
            with watch:
                block(rows())
        with pytest.raises(ZeroDivisionError):
            with watch:  # what goes wrong inside is what is told
                raise ZeroDivisionError

    LocalWorld(2).run(run)


def test_weights_that_are_released_after_use_are_compared_while_they_are_there() -> None:
    def run(world: Communicator) -> str:
        mesh = Mesh(world, MeshShape(dp=2, tp=2))
        block = Block(mesh.communicator("tp"))
        parallel = data_parallel(block, mesh, ShardPolicy(stage=3, alignment=1))
        told = []
        for step in range(2):
            parallel.zero_grad()
            parallel.last_backward()
            try:
                with ReplicaWatch(block, mesh, outputs=OUTPUTS):
                    parallel.module(rows()).sum().backward()
            except ReplicaMismatchError as error:
                told.append(str(error).split(",")[0])
            parallel.reduce()
            parallel.wait()
            for piece in parallel.pieces.values():
                if step == 0 and "norm.weight" in piece.spec.name:
                    piece.parameter.data += mesh.coordinate("tp")
            parallel.publish()
        return told

    found = LocalWorld(4).run(run)

    assert found == [["norm.weight is declared replicated on tp"]] * 4


def test_a_partial_sum_that_is_declared_replicated_is_refused() -> None:
    class Terms(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return mark_partial(hidden, "tp")

    def run(world: Communicator) -> None:
        mesh = Mesh(world, MeshShape(tp=2))
        with pytest.raises(ShardingError, match="output of the model is declared replicated on tp"):
            with ReplicaWatch(terms := Terms(), mesh, outputs={"": ["tp"]}):
                terms(rows())

    LocalWorld(2).run(run)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"outputs": {"nrom": ["tp"]}}, "'nrom' matches no module; did you mean 'norm'"),
        ({"inputs": {"up.*": ["tp"]}}, r"'up\.\*' matches no module"),
        ({"outputs": {"norm": "tp"}}, r"give its axes as a list, such as \['tp'\]"),
        ({"outputs": {"norm": ["tq"]}}, "unknown axis 'tq'"),
        ({"axes": ["tq"]}, "unknown axis 'tq'"),
        ({"partial_gradients": ["nothing"]}, "'nothing' matches no module"),
    ],
)
def test_a_declaration_that_means_nothing_is_refused(declared, message: str) -> None:
    def run(world: Communicator) -> None:
        mesh = Mesh(world, MeshShape(tp=1))
        with pytest.raises(ShardingError, match=message):
            ReplicaWatch(Block(mesh.communicator("tp")), mesh, **declared)

    LocalWorld(1).run(run)
