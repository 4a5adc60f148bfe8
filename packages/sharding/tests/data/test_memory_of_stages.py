"""How many bytes a rank holds at each stage, counted in storages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding.data import DataParallel, ShardPolicy, by_class, data_parallel
from trainwright.sharding.mesh import Mesh, MeshShape

NUM_RANKS = 4
WIDTH = 8
NUM_PARAMETERS = 3 * (WIDTH * WIDTH + WIDTH)


def make(comm: Communicator, stage: int, dtype: torch.dtype, **policy: object) -> DataParallel:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(3)))
    mesh = Mesh(comm, MeshShape(dp=comm.size))
    chosen = {"stage": stage, "units": by_class(nn.Linear), "alignment": 1, **policy}
    return data_parallel(model, mesh, ShardPolicy(**chosen))


def backward(parallel: DataParallel, dtype: torch.dtype) -> None:
    parallel.module(torch.ones(2, WIDTH, dtype=dtype)).float().square().sum().backward()


def step(parallel: DataParallel, dtype: torch.dtype) -> None:
    parallel.zero_grad()
    parallel.last_backward()
    backward(parallel, dtype)
    parallel.reduce()
    parallel.wait()
    parallel.publish()


def bytes_of(*tensors: torch.Tensor | None) -> int:
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t is not None
    }
    return sum(storages.values())


def held_bytes(parallel: DataParallel) -> dict[str, int]:
    """Return bytes of the module's weights, of what the pieces are, and of all gradients."""
    buckets = [bucket for unit in parallel.units.values() for bucket in unit.buckets]
    pieces = [piece.parameter for piece in parallel.pieces.values()]
    parameters = list(parallel.module.parameters())
    gradients = [p.grad for p in (*parameters, *pieces)]
    return {
        "weights": bytes_of(
            *(bucket.weights.full for bucket in buckets),
            *(bucket.weights.kept for bucket in buckets),
        ),
        "masters": bytes_of(*pieces),
        "gradients": bytes_of(*(bucket.sums.full for bucket in buckets), *gradients),
    }


# Bytes a parameter between steps; float32 masters are the weights themselves.
SHARES = {
    (torch.float32, 0): {"weights": 4, "masters": 4, "gradients": 4},
    (torch.float32, 1): {"weights": 4, "masters": 4, "gradients": 4},
    (torch.float32, 2): {"weights": 4, "masters": 4, "gradients": 4 / NUM_RANKS},
    (torch.float32, 3): {
        "weights": 4 / NUM_RANKS,
        "masters": 4 / NUM_RANKS,
        "gradients": 4 / NUM_RANKS,
    },
    (torch.bfloat16, 0): {"weights": 2, "masters": 4, "gradients": 4},
    (torch.bfloat16, 1): {"weights": 2, "masters": 4 / NUM_RANKS, "gradients": 4},
    (torch.bfloat16, 2): {"weights": 2, "masters": 4 / NUM_RANKS, "gradients": 4 / NUM_RANKS},
    (torch.bfloat16, 3): {
        "weights": 2 / NUM_RANKS,
        "masters": 4 / NUM_RANKS,
        "gradients": 4 / NUM_RANKS,
    },
}


@pytest.mark.parametrize(("dtype", "stage"), list(SHARES))
def test_between_steps_a_rank_holds_the_share_of_its_stage(dtype: torch.dtype, stage: int) -> None:
    def run(comm: Communicator) -> list[dict[str, int]]:
        parallel = make(comm, stage, dtype)
        found = []
        for _ in range(2):
            step(parallel, dtype)
            found.append(held_bytes(parallel))
        return found

    expected = {what: int(share * NUM_PARAMETERS) for what, share in SHARES[dtype, stage].items()}
    for found in LocalWorld(NUM_RANKS).run(run):
        assert found == [expected] * 2


@pytest.mark.parametrize("stage", [2, 3])
def test_whole_gradients_have_memory_only_from_the_first_gradient_to_the_reduction(
    stage: int,
) -> None:
    def run(comm: Communicator) -> list[int]:
        parallel = make(comm, stage, torch.float32)
        buckets = [bucket for unit in parallel.units.values() for bucket in unit.buckets]

        def see() -> None:
            views = (member.gradient for bucket in buckets for member in bucket.members)
            seen.append(bytes_of(*(bucket.sums.full for bucket in buckets), *views))

        seen: list[int] = []
        see()
        parallel.zero_grad()
        loss = parallel.module(torch.ones(2, WIDTH)).square().sum()
        see()
        loss.backward()
        see()
        parallel.reduce()
        parallel.wait()
        see()
        return seen

    assert LocalWorld(NUM_RANKS).run(run) == [[0, 0, 4 * NUM_PARAMETERS, 0]] * NUM_RANKS


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_reduced_each_backward_take_one_share_between_micro_batches(stage: int) -> None:
    def run(comm: Communicator) -> list[int]:
        parallel = make(comm, stage, torch.float32, reduce_each_backward=True)
        found = []
        for _ in range(3):
            backward(parallel, torch.float32)
            full = [b.sums.full for unit in parallel.units.values() for b in unit.buckets]
            kept = [b.sums.kept for unit in parallel.units.values() for b in unit.buckets]
            found.append(bytes_of(*full, *kept, *(p.grad for p in parallel.module.parameters())))
        parallel.reduce()
        parallel.wait()
        return found

    assert LocalWorld(NUM_RANKS).run(run) == [[NUM_PARAMETERS] * 3] * NUM_RANKS


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_zeroed_when_gradients_get_memory_is_exactly_the_padding(stage: int) -> None:
    def run(comm: Communicator) -> None:
        parallel = make(comm, stage, torch.float32, alignment=32)
        for unit in parallel.units.values():
            for bucket in unit.buckets:
                bucket.sums.open()
                bucket.sums.full.zero_()
                for place in (*bucket.sums.gaps, *(member.place for member in bucket.members)):
                    bucket.sums.full[place].add_(1)
                assert set(bucket.sums.full.tolist()) == {1.0}
                assert bucket.sums.gaps

    LocalWorld(3).run(run)


def test_gradients_dropped_on_purpose_give_their_memory_back() -> None:
    def run(comm: Communicator) -> int:
        parallel = make(comm, 2, torch.float32)
        backward(parallel, torch.float32)
        parallel.zero_grad(discard=True)
        return held_bytes(parallel)["gradients"]

    assert LocalWorld(2).run(run) == [0, 0]


def test_building_a_cut_model_leaves_no_whole_weights_behind() -> None:
    def run(comm: Communicator) -> int:
        parallel = make(comm, 3, torch.float32)
        return held_bytes(parallel)["weights"]

    assert LocalWorld(NUM_RANKS).run(run) == [4 * NUM_PARAMETERS // NUM_RANKS] * NUM_RANKS


@pytest.mark.parametrize("stage", [2, 3])
def test_during_the_last_backward_only_a_few_buckets_have_gradients_at_once(stage: int) -> None:
    depth = 12

    def run(comm: Communicator) -> int:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)))
        mesh = Mesh(comm, MeshShape(dp=comm.size))
        policy = ShardPolicy(stage=stage, units=by_class(nn.Linear), alignment=1)
        parallel = data_parallel(model, mesh, policy)
        full = [b.sums.full for unit in parallel.units.values() for b in unit.buckets]
        # At stage 3 the first step learns in which order ranks need units.
        for _ in range(2):
            parallel.zero_grad()
            live: list[int] = []
            hidden = torch.ones(2, WIDTH)
            for layer in model:
                hidden = layer(hidden)
                hidden.register_hook(lambda _, seen=live: seen.append(bytes_of(*full)))
            parallel.last_backward()
            hidden.sum().backward()
            parallel.reduce()
            parallel.wait()
        return max(live)

    # One that is written, one under way, one that was just started, and room for one more.
    for most in LocalWorld(2).run(run):
        assert most <= 4 * (4 * WIDTH * WIDTH) < 4 * WIDTH * WIDTH * depth
