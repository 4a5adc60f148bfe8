"""Every stage computes what one process computes."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding.data import (
    DataParallel,
    Piece,
    ShardPolicy,
    UnitRule,
    by_class,
    by_name,
    by_size,
    data_parallel,
)
from trainwright.sharding.data.testing import (
    Network,
    NetworkPlan,
    SerialTrainer,
    network_plans,
    optimizer_states,
)
from trainwright.sharding.mesh import Mesh, MeshShape


def make_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # A large eps: Adam divides by the gradient's size, so with a small one the rounding of a
    # gradient that cancels to almost zero would decide the sign of a full step.
    return torch.optim.AdamW(parameters, lr=0.05, eps=1e-2, weight_decay=0.1)


def make_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


OPTIMIZERS = {"adamw": make_adamw, "sgd": make_sgd}


@attrs.frozen
class Case:
    """A training run: which model, how cut, on which micro-batches."""

    plan: NetworkPlan
    num_ranks: int
    stage: int
    bucket_bytes: int
    alignment: int
    num_microbatches: int
    armed: bool
    optimizer: str
    seed: int
    units: UnitRule | None = None
    each_backward: bool = False
    hooks: bool = False
    keep_gathered: bool = False
    num_steps: int = 10

    @property
    def policy(self) -> ShardPolicy:
        return ShardPolicy(
            stage=self.stage,
            bucket_bytes=self.bucket_bytes,
            alignment=self.alignment,
            units=self.units,
            reduce_each_backward=self.reduces_each,
            release_after_forward=not (self.keep_gathered and self.stage == 3),
        )

    @property
    def reduces_each(self) -> bool:
        return self.each_backward and self.stage >= 2

    def losses(self, model: nn.Module, step: int, rank: int) -> Iterable[torch.Tensor]:
        for microbatch in range(self.num_microbatches):
            key = ((self.seed * 97 + step) * 89 + rank) * 83 + microbatch
            generator = torch.Generator().manual_seed(key)
            skipped = torch.rand(self.plan.depth, generator=generator) < 0.3
            rows = torch.randn(2, self.plan.inputs, generator=generator, dtype=torch.float64)
            chosen = frozenset(skipped.nonzero().flatten().tolist())
            yield model(rows.to(self.plan.dtype), chosen).double().square().sum() / 16


cases = st.builds(
    Case,
    plan=network_plans((torch.float64, torch.float32)),
    num_ranks=st.integers(1, 8),
    stage=st.sampled_from([0, 1, 2, 3]),
    bucket_bytes=st.sampled_from([1, 100, 400, 10**6]),
    alignment=st.sampled_from([1, 4, 32]),
    num_microbatches=st.integers(1, 3),
    armed=st.booleans(),
    optimizer=st.sampled_from(["adamw", "sgd"]),
    seed=st.integers(0, 1000),
    units=st.sampled_from([None, by_class(nn.Linear), by_name("layers.*"), by_size(20)]),
    each_backward=st.booleans(),
    hooks=st.booleans(),
    keep_gathered=st.booleans(),
)


@attrs.frozen
class Snapshot:
    """One step's tensors on one rank, by name."""

    gradients: dict[str, torch.Tensor]
    masters: dict[str, torch.Tensor]
    states: dict[str, dict[str, torch.Tensor]]
    weights: dict[str, torch.Tensor]


def run_step(
    parallel: DataParallel, optimizer: torch.optim.Optimizer, case: Case, step: int, rank: int
) -> Snapshot:
    parallel.zero_grad()
    if not case.hooks:
        parallel.await_weights()
    for microbatch, loss in enumerate(case.losses(parallel.module, step, rank)):
        if case.armed and microbatch == case.num_microbatches - 1:
            parallel.last_backward()
        loss.backward()
        if case.reduces_each and not case.hooks:
            parallel.reduce()
        if not case.hooks and not case.keep_gathered:
            parallel.release()
            parallel.await_weights()
    if not case.reduces_each or case.hooks:
        parallel.reduce()
    parallel.wait()
    pieces = parallel.pieces
    gradients = {name: piece.parameter.grad.clone() for name, piece in pieces.items()}
    optimizer.step()
    parallel.publish()
    parallel.await_weights()
    weights = {name: p.detach().clone() for name, p in parallel.module.named_parameters()}
    parallel.release()
    parameters = {name: piece.parameter for name, piece in pieces.items()}
    return Snapshot(
        gradients,
        {name: parameter.detach().clone() for name, parameter in parameters.items()},
        optimizer_states(optimizer, parameters),
        weights,
    )


def train_rank(comm: Communicator, case: Case) -> tuple[dict[str, Piece], list[Snapshot]]:
    mesh = Mesh(comm, MeshShape(dp=comm.size))
    # Other weights on other ranks: those of the first one count.
    model = Network(case.plan, seed=comm.rank)
    parallel = data_parallel(model, mesh, case.policy, hooks=case.hooks)
    pieces = parallel.pieces
    optimizer = OPTIMIZERS[case.optimizer](
        [piece.parameter for piece in pieces.values()] or [nn.Parameter(torch.zeros(1))]
    )
    steps = [run_step(parallel, optimizer, case, step, comm.rank) for step in range(case.num_steps)]
    return pieces, steps


def assemble(
    pieces: list[dict[str, Piece]], tensors: list[dict[str, torch.Tensor]], name: str
) -> torch.Tensor:
    """Put the ranks' pieces of one parameter together, checking that they cover it."""
    spec = next(held[name].spec for held in pieces if name in held)
    dtype = next(held[name].dtype for held in tensors if name in held)
    whole = torch.full(spec.global_shape, torch.nan, dtype=dtype)
    for held, values in zip(pieces, tensors, strict=True):
        if name in held:
            held[name].spec.insert(values[name], whole)
    assert not whole.isnan().any(), f"no rank holds a part of {name}"
    return whole


def assert_close(found: torch.Tensor, wanted: torch.Tensor, relative: float, what: str) -> None:
    largest = max(wanted.abs().max().item(), 1e-6) if wanted.numel() else 0.0
    torch.testing.assert_close(
        found.to(wanted.dtype),
        wanted,
        rtol=0,
        atol=relative * largest,
        msg=lambda m: f"{what}: {m}",
    )


def check_against_serial(case: Case, tolerances: list[float]) -> None:
    serial = SerialTrainer(Network(case.plan), OPTIMIZERS[case.optimizer])

    results = LocalWorld(case.num_ranks).run(train_rank, case)

    pieces = [held for held, _ in results]
    for step, relative in enumerate(tolerances):
        ranks = range(case.num_ranks)
        wanted = serial.step(
            loss for rank in ranks for loss in case.losses(serial.module, step, rank)
        )
        found = [steps[step] for _, steps in results]
        states = serial.states()
        for name, gradient in wanted.items():
            at = f"step {step}, {name}"
            assert_close(
                assemble(pieces, [s.gradients for s in found], name), gradient, relative, at
            )
            master = serial.masters[name].detach()
            assert_close(assemble(pieces, [s.masters for s in found], name), master, relative, at)
            for key, value in states[name].items():
                if value.dim() == 0:
                    continue
                parts = [{n: state[key] for n, state in s.states.items()} for s in found]
                assert_close(assemble(pieces, parts, name), value, relative, f"{at}, {key}")
        for name, weight in serial.module.named_parameters():
            assert_close(found[0].weights[name], weight.detach(), relative, f"{step} {name}")
            for snapshot in found[1:]:
                assert torch.equal(snapshot.weights[name], found[0].weights[name])


@given(case=cases)
def test_every_stage_computes_what_one_process_computes(case: Case) -> None:
    # A sum of at most 24 terms in another order, through three steps of a smooth model, and what
    # seven more pass on of it.
    first, later = (1e-12, 1e-11) if case.plan.dtype == torch.float64 else (2e-5, 1e-4)

    check_against_serial(case, [first] * 3 + [later] * (case.num_steps - 3))


@given(case=cases, dtype=st.sampled_from([torch.bfloat16, torch.float16]))
def test_sixteen_bit_weights_are_trained_through_float32_gradients_and_masters(
    case: Case, dtype: torch.dtype
) -> None:
    case = attrs.evolve(case, plan=attrs.evolve(case.plan, dtype=dtype))

    # The first step sees equal weights, so only float32 sums differ. Later a weight may round to
    # the neighbouring 16-bit value, which moves gradients by the format's precision.
    check_against_serial(case, [1e-5, 0.1])


@pytest.mark.parametrize("stage", [0, 1])
def test_masters_start_from_the_weights_before_they_were_rounded(stage: int) -> None:
    def run(comm: Communicator) -> list[torch.Tensor]:
        mesh = Mesh(comm, MeshShape(dp=comm.size))
        model = Network(NetworkPlan(dtype=torch.float32))
        policy = ShardPolicy(stage=stage, alignment=1, parameter_dtype=lambda *_: torch.bfloat16)
        parallel = data_parallel(model, mesh, policy)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        return [piece.spec for piece in parallel.pieces.values()], [
            piece.parameter.detach().clone() for piece in parallel.pieces.values()
        ]

    plain = dict(Network(NetworkPlan(dtype=torch.float32)).named_parameters())

    for specs, masters in LocalWorld(3).run(run):
        for spec, master in zip(specs, masters, strict=True):
            flat = plain[spec.name].detach().flatten()
            assert torch.equal(master.flatten(), flat[spec.start : spec.stop])
