"""One call clips DTensors of any placements on any meshes beside plain shards, as if whole."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainwright.collectives.testing import run_processes
from trainwright.stability_guards import (
    GuardError,
    clip_grad_adaptive_,
    clip_grad_norm_,
    clip_grad_value_,
    global_norm,
    non_finite_names,
)

SHAPES = [(4, 6), (5, 3), (7,), (1,), (3, 2), ()]
PLACEMENTS = [
    (Shard(0), Shard(1)),
    (Shard(0), Shard(0)),  # uneven: some ranks hold nothing
    (Shard(0), Replicate()),
    (Replicate(), Shard(0)),
    (Replicate(), Replicate()),
    (Replicate(), Replicate()),
]


def wholes(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def plain_parameters(weights, gradients):
    found = [nn.Parameter(weight.clone()) for weight in weights]
    for parameter, gradient in zip(found, gradients, strict=True):
        parameter.grad = gradient.clone()
    return found


def placed_parameters(weights, gradients, mesh, placements=PLACEMENTS):
    found = []
    for weight, gradient, placement in zip(weights, gradients, placements, strict=True):
        parameter = nn.Parameter(distribute_tensor(weight.clone(), mesh, placement))
        parameter.grad = distribute_tensor(gradient.clone(), mesh, placement)
        found.append(parameter)
    return found


def check_equal(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        whole = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
        torch.testing.assert_close(whole, theirs.grad, rtol=1e-12, atol=1e-14)


def compare_with_wholes(communicator):
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = init_device_mesh("cpu", (4,))
    weights, gradients = wholes(0), wholes(1)
    clips = [
        lambda ps: clip_grad_norm_(ps, 0.5),
        lambda ps: clip_grad_norm_(ps, 0.5, 1.0),
        lambda ps: clip_grad_norm_(ps, 0.5, math.inf),
        lambda ps: clip_grad_value_(ps, 0.3),
        lambda ps: clip_grad_adaptive_(ps, 0.2),
    ]
    for clip in clips:
        expected = plain_parameters(weights * 2 + weights[:1], gradients * 2 + gradients[:1])
        norm = clip(expected)
        found = [
            *placed_parameters(weights, gradients, square),
            *placed_parameters(weights, gradients, line, [p[:1] for p in PLACEMENTS]),
            *plain_parameters(weights[:1], gradients[:1]),
        ]
        assert clip(found).item() == pytest.approx(norm.item(), rel=1e-12)
        check_equal(found, expected)
    check_partial_sums(square, communicator.rank)
    check_axes(square, communicator)
    check_non_finite(square, communicator.rank)
    return True


def check_partial_sums(mesh, rank):
    local = torch.tensor([3.0, -4.0], dtype=torch.float64) * (1 + rank)
    sums = DTensor.from_local(local, mesh, [Partial(), Replicate()], run_check=False)
    whole = sums.full_tensor()
    parameter = nn.Parameter(
        DTensor.from_local(torch.zeros_like(local), mesh, [Replicate()] * 2, run_check=False)
    )
    parameter.grad = sums

    norm = clip_grad_norm_([parameter], 1.0)

    assert norm.item() == pytest.approx(whole.norm().item())
    clipped = parameter.grad.full_tensor()
    torch.testing.assert_close(clipped, whole / (norm + 1e-6), rtol=1e-12, atol=0.0)
    for refused in (lambda p: clip_grad_value_(p, 1.0), clip_grad_adaptive_):
        with pytest.raises(GuardError, match="gradient of parameter 0 is a partial sum"):
            refused([parameter])


def check_axes(mesh, communicator):
    """Each row of the mesh is a stage of a pipeline with a DTensor of its own."""
    weights, gradients = wholes(2)[:2], wholes(3)[:2]
    expected = plain_parameters(weights, gradients)
    norm = clip_grad_norm_(expected, 0.5)
    stage, place = divmod(communicator.rank, 2)
    pp = communicator.split(place, stage)
    mine = placed_parameters(
        weights[stage : stage + 1], gradients[stage : stage + 1], mesh["tp"], [(Shard(1),)]
    )
    with pytest.raises(GuardError, match=r"parameter 0 is a DTensor.*pass sharded as a function"):
        clip_grad_norm_(mine, 0.5, communicator=pp)
    found = clip_grad_norm_(mine, 0.5, communicator=pp, sharded=lambda p: True)
    assert found.item() == pytest.approx(norm.item(), rel=1e-12)
    check_equal(mine, expected[stage : stage + 1])
    # A DTensor over the communicator's own ranks is the same on all of them.
    everywhere = placed_parameters(weights[:1], gradients[:1], mesh, [PLACEMENTS[0]])
    shard = plain_parameters(weights[1:], gradients[1:])[0]
    rows = slice(communicator.rank, None, 4)
    shard = plain_parameters([shard.detach()[rows]], [shard.grad[rows]])[0]
    found = clip_grad_norm_(
        [*everywhere, shard], 0.5, communicator=communicator, sharded=lambda p: p is shard
    )
    assert found.item() == pytest.approx(norm.item(), rel=1e-12)
    check_equal(everywhere, expected[:1])


def check_non_finite(mesh, rank):
    weights, gradients = wholes(0), wholes(1)
    gradients[0][-1, -1] = math.nan  # on rank 3
    for clip in (
        lambda ps: clip_grad_norm_(ps, 0.5),
        lambda ps: clip_grad_norm_(ps, 0.5, math.inf),
        lambda ps: clip_grad_value_(ps, 0.3),
        lambda ps: clip_grad_adaptive_(ps, 0.2),
    ):
        found = placed_parameters(weights, gradients, mesh)
        before = [p.grad.to_local().clone() for p in found]
        assert math.isnan(clip(found).item())
        for parameter, kept in zip(found, before, strict=True):
            torch.testing.assert_close(
                parameter.grad.to_local(), kept, rtol=0, atol=0, equal_nan=True
            )
        assert non_finite_names(found) == (("parameter 0",) if rank == 3 else ())


@pytest.mark.long
@pytest.mark.processes
def test_dtensors_plain_shards_and_partial_sums_are_clipped_as_the_whole_would_be():
    assert run_processes(compare_with_wholes, 4, timeout_s=50.0) == [True] * 4


def test_the_ranks_of_a_mesh_count_each_element_of_dtensors_once():
    """Where nothing is communicated, each rank's norm is that of what it counts itself."""
    gradients = wholes(1)
    squares = 0.0
    for rank in range(4):
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (2, 2))
            at = mesh.get_coordinate()
            shards = []
            for whole, placement in zip(gradients, PLACEMENTS, strict=True):
                local = whole
                for dim, cut in enumerate(placement):
                    if isinstance(cut, Shard):
                        parts = local.chunk(2, cut.dim)
                        here = at[dim] < len(parts)
                        local = parts[at[dim]] if here else local.narrow(cut.dim, 0, 0)
                shards.append(
                    DTensor.from_local(
                        local,
                        mesh,
                        placement,
                        run_check=False,
                        shape=whole.shape,
                        stride=whole.stride(),
                    )
                )
            squares += global_norm(shards, 2.0, None).item() ** 2
        finally:
            dist.destroy_process_group()

    assert squares == pytest.approx(sum(whole.square().sum().item() for whole in gradients))
