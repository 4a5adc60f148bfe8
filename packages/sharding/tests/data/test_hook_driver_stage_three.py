"""Stage 3 under module hooks trains as one process does, and its traffic and memory are stated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding.data import DataParallel, ShardPolicy, by_class, data_parallel
from trainwright.sharding.data.testing import RecordedCall, RecordingCommunicator
from trainwright.sharding.mesh import Mesh, MeshShape

F64 = torch.float64
DEPTH = 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=F64)
        self.up = nn.Linear(width, 2 * width, dtype=F64)
        self.down = nn.Linear(2 * width, width, dtype=F64)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.down(torch.tanh(self.up(self.norm(hidden))))
        return hidden + added


class Model(nn.Module):
    """Blocks in an order of their own, under checkpoints or not, with a tied embedding."""

    def __init__(
        self, order: Sequence[int] = range(DEPTH), recompute: int = 0, frozen: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6, dtype=F64)
        self.blocks = nn.ModuleList(Block(6) for _ in range(DEPTH))
        self.head = nn.Linear(6, 7, bias=False, dtype=F64)
        self.head.weight = self.embed.weight
        self.order = order
        self.recompute = recompute
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=F64) / 2)
        for index in frozen:
            self.blocks[index].requires_grad_(False)

    def forward(self, tokens: torch.Tensor, skipped: frozenset[int] = frozenset()) -> torch.Tensor:
        hidden = self.embed(tokens)
        blocks = [self.blocks[index] for index in self.order if index not in skipped]
        if self.recompute:
            for start in range(0, len(blocks), self.recompute):
                part = nn.Sequential(*blocks[start : start + self.recompute])
                hidden = checkpoint(part, hidden, use_reentrant=False)
        else:
            for block in blocks:
                hidden = block(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


def tokens_of(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 7, (2, 3), generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: nn.Module, step: int, rank: int, *skipped: frozenset[int]) -> torch.Tensor:
    tokens = tokens_of(step, rank)
    loss: torch.Tensor = nn.functional.cross_entropy(
        model(tokens, *skipped).flatten(0, 1), tokens.flip(0).flatten(), reduction="sum"
    )
    return loss


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.03, eps=1e-2)


def shard(model: nn.Module, comm: Communicator, **policy: Any) -> DataParallel:
    mesh = Mesh(comm, MeshShape(dp=comm.size))
    chosen = ShardPolicy(**{"stage": 3, "units": by_class(Block), "alignment": 1, **policy})
    return data_parallel(model, mesh, chosen)


def train_serially(
    make: Callable[[], nn.Module], skips: Sequence[Sequence[frozenset[int]]]
) -> dict[str, torch.Tensor]:
    model = make()
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    for step, ranks in enumerate(skips):
        optimizer.zero_grad(set_to_none=False)
        for rank, skipped in enumerate(ranks):
            loss_of(model, step, rank, skipped).backward()
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return dict(model.named_parameters())


def train_sharded(
    make: Callable[[], nn.Module],
    skips: Sequence[Sequence[frozenset[int]]],
    compile_: Callable[[nn.Module], nn.Module] = lambda model: model,
    armed: bool = True,
    **policy: Any,
) -> list[dict[str, torch.Tensor]]:
    def run(comm: Communicator) -> dict[str, torch.Tensor]:
        model = make()
        parallel = shard(model, comm, **policy)
        compiled = compile_(model)
        optimizer = make_optimizer([piece.parameter for piece in parallel.pieces.values()])
        for step, ranks in enumerate(skips):
            parallel.zero_grad()
            if armed:
                parallel.last_backward()
            loss_of(compiled, step, comm.rank, ranks[comm.rank]).backward()
            parallel.reduce()
            assert not any(unit.is_cut and unit.is_gathered for unit in parallel.units.values())
            parallel.wait()
            optimizer.step()
            parallel.publish()
        parallel.await_weights()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    results: list[dict[str, torch.Tensor]] = LocalWorld(len(skips[0])).run(run)
    return results


def check(
    make: Callable[[], nn.Module], skips: Sequence[Sequence[frozenset[int]]], **options: Any
) -> None:
    expected = train_serially(make, skips)
    for weights in train_sharded(make, skips, **options):
        for name, weight in weights.items():
            # Sums over ranks in another order, through a few AdamW steps with a large eps.
            torch.testing.assert_close(weight, expected[name], rtol=1e-10, atol=1e-12)


@settings(max_examples=5)
@given(
    ranks=st.integers(1, 4),
    order=st.permutations(range(DEPTH)),
    recompute=st.integers(0, 2),
    frozen=st.frozensets(st.integers(0, DEPTH - 1), max_size=2),
    live_units=st.integers(1, 3),
    keep=st.booleans(),
    each=st.booleans(),
    data=st.data(),
)
def test_training_equals_one_process(
    ranks: int,
    order: list[int],
    recompute: int,
    frozen: frozenset[int],
    live_units: int,
    keep: bool,
    each: bool,
    data: st.DataObject,
) -> None:
    draw = st.lists(st.frozensets(st.integers(0, DEPTH - 1)), min_size=ranks, max_size=ranks)
    nothing = [frozenset[int]()] * ranks
    skips = [nothing, *data.draw(st.lists(draw, min_size=2, max_size=2))]

    check(
        lambda: Model(order, recompute, sorted(frozen)),
        skips,
        live_units=live_units,
        release_after_forward=not keep,
        reduce_each_backward=each,
    )


@pytest.mark.parametrize("keep", [False, True])
def test_ranks_may_finish_the_same_units_at_different_places_of_their_backwards(keep: bool) -> None:
    # Rank 1 leaves out a block and recomputes others together than rank 0 does.
    skips = [[frozenset[int]()] * 2, [frozenset(), frozenset({0})], [frozenset({3}), frozenset()]]
    check(
        lambda: Model([0, 1, 3, 2], recompute=2),
        skips,
        live_units=1,
        release_after_forward=not keep,
    )


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_kept_units_may_run_again_in_backwards_inside_of_a_backward() -> None:
    class Reentrant(Model):
        def forward(self, tokens: torch.Tensor, skipped: frozenset[int] = frozenset()) -> Any:
            hidden = self.embed(tokens)
            for block in self.blocks:
                hidden = checkpoint(block, hidden, use_reentrant=True)
            return self.head(hidden)

    check(Reentrant, [[frozenset()] * 2] * 3, release_after_forward=False, armed=False)


def compile_units(model: nn.Module) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        block.compile(backend="eager")
    return model


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler looks at it
def test_compiled_units_train_as_others_do() -> None:
    torch.compiler.reset()
    check(Model, [[frozenset(), frozenset({1})]] * 2, compile_=compile_units)


@pytest.mark.parametrize(("keep", "gathers"), [(False, 2), (True, 1)])
def test_a_step_moves_each_weight_once_or_twice_and_each_gradient_once(
    keep: bool, gathers: int
) -> None:
    def run(comm: Communicator) -> tuple[list[tuple[str, int]], int]:
        calls: list[RecordedCall] = []
        model = Model()
        mesh = Mesh(RecordingCommunicator(comm, calls), MeshShape(dp=comm.size))
        policy = ShardPolicy(
            stage=3, units=by_class(Block), alignment=1, release_after_forward=not keep
        )
        parallel = data_parallel(model, mesh, policy)
        for step in range(2):
            calls.clear()
            parallel.zero_grad()
            parallel.last_backward()
            loss_of(model, step, comm.rank).backward()
            parallel.reduce()
            parallel.wait()
            parallel.publish()
        return [(call.operation, call.numel) for call in calls], sum(
            parameter.numel() for parameter in model.parameters()
        )

    for calls, numel in LocalWorld(2).run(run):
        moved = {
            operation: sum(size for name, size in calls if name == operation)
            for operation, _ in calls
        }
        # And two numbers, by which the ranks see that they gathered the same.
        assert moved == {"all_gather": gathers * numel, "reduce_scatter": numel, "all_reduce": 2}
