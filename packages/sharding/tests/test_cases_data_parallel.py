"""What went wrong in other systems: gradients of skipped, late, repeated and recomputed layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding import LifecycleError, Mesh, MeshShape
from trainwright.sharding.data.testing_ways import WAYS, Driven, Way, assemble
from trainwright.sharding.data.units import by_class

EVERY_WAY = pytest.mark.parametrize("way", WAYS, ids=str)
ONCE_A_STEP = pytest.mark.parametrize("way", [way for way in WAYS if not way.each], ids=str)
Skips = dict[int, set[int]]


class Layers(nn.Module):
    """Layers of one size, of which a forward may leave some out, as routers and LayerDrop do."""

    def __init__(self, count: int = 4, frozen: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, dtype=torch.float64) for _ in range(count))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        if frozen is not None:
            self.layers[frozen].requires_grad_(False)

    def forward(
        self, inputs: torch.Tensor, skipped: set[int] = frozenset(), recomputed: bool = False
    ) -> torch.Tensor:
        hidden = inputs
        for number, layer in enumerate(self.layers):
            if number in skipped:
                continue
            if recomputed:
                outputs = checkpoint(layer, hidden, use_reentrant=False)
            else:
                outputs = layer(hidden)
            hidden = hidden + torch.tanh(outputs)
        return hidden.square().sum()


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2, 3, generator=generator, dtype=torch.float64)


def serial_gradients(model: nn.Module, losses: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for loss in losses:
        if loss.requires_grad:
            loss.backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def drive(way: Way, model: nn.Module, comm: Communicator, **policy: object) -> Driven:
    """Drive a model whose layers are units over all ranks."""
    units = by_class(nn.Linear)
    return way.drive(model, Mesh(comm, MeshShape(dp=comm.size)), units=units, **policy)


SKIPS: tuple[Callable[[int], set[int]], ...] = (
    lambda rank: set(),
    lambda rank: {rank},  # each rank leaves out another layer
    lambda rank: {2} if rank == 1 else set(),  # one rank leaves out a layer
    lambda rank: {0, 3},  # layers rest that were used before
    lambda rank: {0, 1, 2, 3} - {rank},  # each rank runs one layer, as with routed experts
    lambda rank: {0, 1, 2, 3} if rank == 0 else set(),  # a rank runs none
)
"""What ranks leave out, step by step."""


@EVERY_WAY
def test_a_skipped_layers_gradient_is_zero_and_never_an_old_one_or_anothers(way: Way) -> None:
    def run(comm: Communicator) -> list[object]:
        driven = drive(way, Layers(), comm)
        found: list[object] = []
        for step, skips in enumerate(SKIPS):
            inputs = batch(step, comm.rank).requires_grad_()  # so that any rank has a backward
            driven.reduce([partial(driven.parallel.module, inputs, skips(comm.rank))])
            found.append(driven.gradients())
        return found

    ranks = LocalWorld(3).run(run)

    for step, skips in enumerate(SKIPS):
        model = Layers()
        expected = serial_gradients(
            model, [model(batch(step, rank), skips(rank)) for rank in range(3)]
        )
        torch.testing.assert_close(assemble(rank[step] for rank in ranks), expected)


@ONCE_A_STEP
@pytest.mark.parametrize(
    ("skipped", "told"),
    [
        (
            {0: {1}, 1: {2}},
            r"layers\.1\.weight .on rank 0.*layers\.[12]\.\w+ .on rank [01]",
        ),
        ({1: {3}}, r"layers\.3\.bias .on rank 1.; layers\.3\.weight .on rank 1"),
        ({0: {0}, 1: {0}}, r"layers\.0\.weight .on every rank"),
    ],
    ids=str,
)
def test_where_it_is_to_be_an_error_it_names_parameters_and_ranks_on_every_rank(
    skipped: Skips, told: str, way: Way
) -> None:
    def run(comm: Communicator) -> list[object]:
        driven = drive(way, Layers(), comm, missing_gradients="error")
        model = driven.parallel.module
        with pytest.raises(LifecycleError, match=told):
            driven.reduce([lambda: model(batch(0, comm.rank), skipped.get(comm.rank, set()))])
        driven.parallel.zero_grad(discard=True)
        driven.reduce([lambda: model(batch(1, comm.rank))])
        return driven.gradients()

    ranks = LocalWorld(2).run(run)

    plain = Layers()
    expected = serial_gradients(plain, [plain(batch(1, rank)) for rank in range(2)])
    torch.testing.assert_close(assemble(ranks), expected)


@EVERY_WAY
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_layer_first_used_in_a_later_micro_batch_starts_from_nothing(
    way: Way, ranks: int
) -> None:
    def run(comm: Communicator) -> list[object]:
        driven = drive(way, Layers(), comm)
        model = driven.parallel.module
        found: list[object] = []
        for step in range(2):
            early = partial(model, batch(step, comm.rank), {3})
            late = partial(model, batch(step + 7, comm.rank))
            driven.reduce([early, late])
            found.append(driven.gradients())
        return found

    results = LocalWorld(ranks).run(run)

    for step in range(2):
        model = Layers()
        losses = [model(batch(step, rank), {3}) for rank in range(ranks)]
        losses += [model(batch(step + 7, rank)) for rank in range(ranks)]
        expected = serial_gradients(model, losses)
        torch.testing.assert_close(assemble(rank[step] for rank in results), expected)


class Scaled(nn.Module):
    """One number, whose gradient is what the forward multiplies it with."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, dtype=dtype))

    def forward(self, factor: float) -> torch.Tensor:
        return (self.w * factor).sum()


def summed(way: Way, factors: list[list[float]], dtype: torch.dtype, **policy: object) -> float:
    """Return the one gradient that all ranks' factors, each list a rank's micro-batches, give."""

    def run(comm: Communicator) -> list[object]:
        driven = drive(way, Scaled(dtype), comm, **policy)
        for _ in range(2):
            driven.reduce(
                [partial(driven.parallel.module, factor) for factor in factors[comm.rank]]
            )
        return driven.gradients()

    gradient = assemble(LocalWorld(len(factors)).run(run))["w"]
    assert gradient.dtype == torch.float32
    assert len(set(gradient.tolist())) == 1
    return gradient[0].item()


@EVERY_WAY
@pytest.mark.parametrize(
    ("factors", "total", "dtype"),
    [
        ([[1.0, 2.0, 4.0], [3.0, 2.0, 0.0]], 12.0, torch.float32),
        ([[1.0, 1.0], [3.0, 3.0]], 8.0, torch.bfloat16),
        ([[8.0, 1.0, 1.0, 1.0]], 11.0, torch.bfloat16),
    ],
    ids=str,
)
def test_every_micro_batch_of_every_rank_counts_once(
    factors: list[list[float]], total: float, dtype: torch.dtype, way: Way
) -> None:
    assert summed(way, factors, dtype) == total


@EVERY_WAY
def test_the_sum_does_not_depend_on_the_split_into_micro_batches(way: Way) -> None:
    whole = summed(way, [[6.0], [10.0]], torch.float32)
    uneven = summed(way, [[1.0, 0.0, 5.0], [0.0, 9.0, 1.0]], torch.float32)

    assert whole == uneven == 16.0


@EVERY_WAY
def test_sixteen_bit_gradients_are_summed_over_ranks_in_float32(way: Way) -> None:
    assert summed(way, [[1.0], [2.0**-9]], torch.bfloat16) == 1 + 2**-9


@EVERY_WAY
def test_sums_travel_in_bfloat16_only_where_asked(way: Way) -> None:
    asked = {"reduce_dtype": torch.bfloat16}

    assert summed(way, [[1.0], [2.0**-9]], torch.float32, **asked) == 1.0
    assert summed(way, [[1.0], [2.0]], torch.bfloat16, **asked) == 3.0


@pytest.mark.parametrize("way", [way for way in WAYS if way.stage > 0], ids=str)
def test_a_hybrid_mesh_sums_what_a_flat_one_sums(way: Way) -> None:
    def run(comm: Communicator) -> list[object]:
        mesh = Mesh(comm, MeshShape(dp=4, dp_shard=2))
        driven = way.drive(Scaled(), mesh)
        driven.reduce([lambda: driven.parallel.module(2.0**comm.rank)])
        return driven.gradients()

    gradient = assemble(LocalWorld(4).run(run))["w"]

    assert gradient.tolist() == [15.0] * 4


@EVERY_WAY
@pytest.mark.parametrize("frozen", [None, 1])
def test_recomputed_layers_give_bitwise_the_gradients_of_kept_ones(
    frozen: int | None, way: Way
) -> None:
    def run(comm: Communicator) -> list[list[object]]:
        found: list[list[object]] = []
        for recomputed in (False, True):
            driven = drive(way, Layers(3, frozen), comm)
            model = driven.parallel.module
            for step in range(2):
                loss = partial(model, batch(step, comm.rank), recomputed=recomputed)
                driven.reduce([loss, loss])
            found.append(driven.gradients())
        return found

    ranks = LocalWorld(2).run(run)

    kept, again = (assemble(rank[number] for rank in ranks) for number in range(2))
    plain = Layers(3, frozen)
    expected = serial_gradients(plain, [plain(batch(1, rank)) for rank in (0, 0, 1, 1)])
    assert kept.keys() == expected.keys()
    for name, gradient in kept.items():
        assert torch.equal(gradient, again[name])
        torch.testing.assert_close(gradient, expected[name])


class Odd(nn.Module):
    """Sizes that four ranks do not divide, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        for number, shape in enumerate([(5,), (0, 3), (), (6,), (1,), (2, 1)]):
            self.register_parameter(f"p{number}", nn.Parameter(torch.zeros(shape)))

    def forward(self) -> torch.Tensor:
        total = torch.zeros(())
        for number, parameter in enumerate(self.parameters(), start=1):
            order = torch.arange(1.0, parameter.numel() + 1).view(parameter.shape)
            total = total + (parameter * order * number).sum()
        return total


@EVERY_WAY
@pytest.mark.parametrize(("alignment", "together"), [(1, True), (32, False)])
def test_padding_never_reaches_a_neighbour(way: Way, alignment: int, together: bool) -> None:
    def run(comm: Communicator) -> dict[str, list[float]]:
        mesh = Mesh(comm, MeshShape(dp=4))
        bucket_bytes = 2**20 if together else 1
        driven = way.drive(Odd(), mesh, alignment=alignment, bucket_bytes=bucket_bytes)
        pieces = [piece.parameter for piece in driven.parallel.pieces.values()]
        optimizer = torch.optim.SGD([{"params": pieces}], lr=1.0)
        for _ in range(2):
            driven.reduce([driven.parallel.module])
            optimizer.step()
            driven.parallel.publish()
        return {name: value.flatten().tolist() for name, value in driven.weights().items()}

    expected = {
        name: [-8.0 * number * order for order in range(1, parameter.numel() + 1)]
        for number, (name, parameter) in enumerate(Odd().named_parameters(), start=1)
    }
    assert LocalWorld(4).run(run) == [expected] * 4


@pytest.mark.parametrize("way", [way for way in WAYS if way.stage >= 2], ids=str)
def test_gradients_take_a_ranks_part_between_micro_batches_or_all_as_chosen(way: Way) -> None:
    def live(driven: Driven) -> int:
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for unit in driven.parallel.units.values()
            for bucket in unit.buckets
            for tensor in (bucket.sums.full, bucket.sums.kept)
        }
        return sum(storages.values()) // 4

    def run(comm: Communicator) -> tuple[list[int], list[object]]:
        model = nn.Linear(1000, 1, bias=False)
        driven = way.drive(model, Mesh(comm, MeshShape(dp=4)))
        inputs = torch.full((1, 1000), comm.rank + 1.0)
        seen: list[int] = []
        for _ in range(3):
            driven.accumulate(lambda: model(inputs).sum())
            seen.append(live(driven))
        driven.parallel.reduce()
        driven.parallel.wait()
        seen.append(live(driven))
        return seen, driven.gradients()

    ranks = LocalWorld(4).run(run)

    for seen, _ in ranks:
        between = 250 if way.each else 1250
        assert seen == [between] * 3 + [250]
    gradient = assemble(parts for _, parts in ranks)["weight"]
    assert set(gradient.flatten().tolist()) == {30.0}


@EVERY_WAY
def test_a_step_that_was_forgotten_is_told_and_not_mixed_into_the_next(way: Way) -> None:
    def run(comm: Communicator) -> list[object]:
        driven = drive(way, Scaled(), comm)
        module = driven.parallel.module
        for _ in range(2):
            driven.accumulate(lambda: module(8.0))
        with pytest.raises(LifecycleError, match=r"call reduce\(\) and wait\(\)"):
            driven.parallel.zero_grad()
        if way.each:
            driven.parallel.reduce()
            driven.parallel.wait()
        driven.parallel.zero_grad(discard=True)
        driven.reduce([lambda: module(1.0), lambda: module(2.0)])
        return driven.gradients()

    assert assemble(LocalWorld(2).run(run))["w"].tolist() == [6.0] * 4
