"""An optimizer on the wrong tensors, or of the wrong kind for pieces, is told by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding import Mesh, MeshShape, NotAvailableError, ShardingError
from trainwright.sharding.data import (
    DataParallel,
    ShardPolicy,
    WholeMatrices,
    check_optimizer,
    data_parallel,
    parameter_groups,
)
from trainwright.sharding.data.optimizers import ELEMENT_WISE
from trainwright.sharding.data.testing import wrap
from trainwright.sharding.placement import ParameterPlacement

STAGES = pytest.mark.parametrize("stage", [0, 3])
CUT = pytest.mark.parametrize("stage", [1, 2, 3])
Build = Callable[[DataParallel], torch.optim.Optimizer]


def layers(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4, dtype=dtype), nn.Linear(4, 4, dtype=dtype))
    model.register_parameter("fixed", nn.Parameter(torch.ones(3), requires_grad=False))
    return model


class Lamb(torch.optim.SGD):
    """Stands for an optimizer of somebody else."""


class Custom(torch.optim.SGD):
    """An optimizer whose name says nothing."""


class LaterMuon(torch.optim.Muon):
    """A refinement of an optimizer that is known not to be element-wise."""


@STAGES
@pytest.mark.parametrize("kind", ELEMENT_WISE)
def test_the_optimizers_documented_as_element_wise_pass_on_pieces(
    kind: type[torch.optim.Optimizer], stage: int
) -> None:
    parallel = wrap(layers(), stage=stage)

    check_optimizer(parallel, kind(parameter_groups(parallel, parallel.module.parameters())))


def test_every_optimizer_of_pytorch_is_known_to_be_element_wise_or_not() -> None:
    from trainwright.sharding.data.optimizers import NOT_ELEMENT_WISE

    ours = {*ELEMENT_WISE, *NOT_ELEMENT_WISE, torch.optim.SparseAdam, torch.optim.Optimizer}
    theirs = {
        kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }

    assert theirs == ours


def test_at_stage_zero_in_full_precision_the_modules_own_parameters_are_pieces() -> None:
    parallel = wrap(layers())

    check_optimizer(parallel, torch.optim.AdamW(parallel.module.parameters()))


def on_the_module(parallel: DataParallel) -> torch.optim.Optimizer:
    return torch.optim.SGD(parallel.module.parameters())


def without_the_last(parallel: DataParallel) -> torch.optim.Optimizer:
    return torch.optim.SGD([piece.parameter for piece in list(parallel.pieces.values())[:-1]])


def with_a_stranger(parallel: DataParallel) -> torch.optim.Optimizer:
    pieces = [piece.parameter for piece in parallel.pieces.values()]
    return torch.optim.SGD([{"params": pieces}, {"params": [nn.Parameter(torch.ones(2, 7))]}])


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [(0, torch.bfloat16), (1, torch.float32), (2, torch.float32), (3, torch.bfloat16)],
)
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (on_the_module, "built on 0.weight, 0.bias, 1.weight and 1 more of the module"),
        (without_the_last, r"no optimizer holds the piece of [01]\.bias"),
        (with_a_stranger, r"group 1 of SGD holds a tensor of shape \(2, 7\) that is no piece"),
    ],
)
def test_an_optimizer_on_the_wrong_tensors_is_told_with_names(
    build: Build, message: str, stage: int, dtype: torch.dtype
) -> None:
    def run(comm: Communicator) -> None:
        parallel = wrap(layers(dtype), comm, stage=stage, bucket_bytes=1)
        with pytest.raises(ShardingError, match=message):
            check_optimizer(parallel, build(parallel))

    LocalWorld(2).run(run)


def test_several_optimizers_hold_each_piece_once_between_them() -> None:
    parallel = wrap(layers(), stage=1)
    first, second = (
        torch.optim.SGD(parameter_groups(parallel, lambda spec, i=i: spec.name.startswith(i)))
        for i in "01"
    )
    everything = torch.optim.SGD(parameter_groups(parallel, lambda spec: True))

    check_optimizer(parallel, first, second)

    with pytest.raises(ShardingError, match=r"no optimizer holds the piece of 1\.weight, 1\.bias"):
        check_optimizer(parallel, first)
    with pytest.raises(ShardingError, match=r"the piece of 0\.weight is in two optimizers"):
        check_optimizer(parallel, first, everything)
    with pytest.raises(ShardingError, match="at least one optimizer"):
        check_optimizer(parallel)


@CUT
@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        (torch.optim.Muon, {}, "Muon orthogonalises whole matrices.*WholeMatrices"),
        (LaterMuon, {}, "LaterMuon orthogonalises whole matrices"),
        (torch.optim.Adafactor, {}, "Adafactor keeps sums over whole rows and columns"),
        (torch.optim.LBFGS, {}, "LBFGS takes inner products over all elements"),
        (torch.optim.SparseAdam, {}, "SparseAdam needs sparse gradients"),
        (Lamb, {}, "Lamb is not known to be element-wise .by its name it scales by the norms"),
        (Custom, {}, "Custom is not known to be element-wise, and"),
    ],
)
def test_where_pieces_are_cut_an_optimizer_that_needs_more_than_elements_is_refused(
    kind: Any, options: dict[str, Any], why: str, stage: int
) -> None:
    def run(comm: Communicator) -> None:
        parallel = wrap(layers(), comm, stage=stage)
        optimizer = kind([nn.Parameter(torch.ones(2, 2))], **options)
        with pytest.raises(NotAvailableError, match=why):
            check_optimizer(parallel, optimizer)

    LocalWorld(2).run(run)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_flat_piece_is_not_the_matrix_even_where_one_rank_keeps_all_of_it(stage: int) -> None:
    parallel = wrap(layers(), stage=stage)

    with pytest.raises(NotAvailableError, match="Adafactor keeps sums"):
        check_optimizer(
            parallel, torch.optim.Adafactor(parameter_groups(parallel, lambda spec: True))
        )


def test_at_stage_zero_any_optimizer_updates_whole_parameters() -> None:
    def run(comm: Communicator) -> None:
        parallel = wrap(layers(), comm)
        matrices = parameter_groups(parallel, lambda spec: len(spec.global_shape) == 2)
        vectors = parameter_groups(parallel, lambda spec: len(spec.global_shape) == 1)
        check_optimizer(parallel, torch.optim.Muon(matrices), Lamb(vectors))

    LocalWorld(2).run(run)


def test_at_stage_zero_a_tensor_parallel_shard_is_not_whole_either() -> None:
    def run(comm: Communicator) -> None:
        model = nn.Linear(4, 4, bias=False)
        part = nn.Parameter(torch.ones(2, 4))
        model.weight = part
        place = ParameterPlacement.sharded((4, 4), 0, rank=comm.rank, size=2)
        mesh = Mesh(comm, MeshShape(tp=2))
        parallel = data_parallel(model, mesh, ShardPolicy(), {"weight": place})
        with pytest.raises(NotAvailableError, match="Muon orthogonalises whole matrices"):
            check_optimizer(parallel, torch.optim.Muon([part]))

    LocalWorld(2).run(run)


@CUT
def test_an_unknown_optimizer_passes_where_the_user_declares_it(stage: int) -> None:
    def run(comm: Communicator) -> None:
        parallel = wrap(layers(), comm, stage=stage)
        optimizer = Custom(parameter_groups(parallel, lambda spec: True))
        check_optimizer(parallel, optimizer, element_wise=True)

        muon = torch.optim.Muon([nn.Parameter(torch.ones(2, 2))])
        with pytest.raises(NotAvailableError, match="Muon orthogonalises"):
            check_optimizer(parallel, muon, element_wise=True)

    LocalWorld(2).run(run)


@CUT
def test_whole_matrices_and_an_optimizer_of_the_rest_pass_together(stage: int) -> None:
    def two_dims(dims: Iterable[int]) -> bool:
        return len(tuple(dims)) == 2

    def run(comm: Communicator) -> None:
        parallel = wrap(layers(), comm, stage=stage)
        muon = WholeMatrices(parallel, lambda spec: two_dims(spec.global_shape), torch.optim.Muon)
        rest = parameter_groups(parallel, lambda spec: not two_dims(spec.global_shape))
        check_optimizer(parallel, muon, torch.optim.AdamW(rest))

    LocalWorld(2).run(run)
