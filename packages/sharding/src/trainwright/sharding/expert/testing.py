"""Drawn layers of experts, and the law that they compute plain loops on every mesh."""

# Shapes: B batch, S sequence, D model, F features of an expert, E experts, N tokens of a group.

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs
import torch
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding.expert.routing import Routing
from trainwright.sharding.expert.testing_plain import ExpertCase, PlainMixture
from trainwright.sharding.mesh import Mesh
from trainwright.sharding.placement.parameters import placements_of, shard_spec
from trainwright.sharding.testing.laws import load_plain_


@attrs.frozen(eq=False)
class _Expected:
    output: torch.Tensor
    input_gradient: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    losses: tuple[float, float]


def check_experts_compute_the_plain_mixture(case: ExpertCase) -> None:
    """Law: output, losses and every gradient are those of loops in one process.

    With ``scope="microbatch"`` the loops have the same groups: the sequences of one data rank.
    """
    plain = PlainMixture(case)
    hidden = case.draw("hidden", case.batch, case.length, case.width).requires_grad_()
    upstream = case.draw("upstream", case.batch, case.length, case.width)
    valid = case.valid()
    expected = _compute_plain(case, plain, hidden, upstream, valid)

    def run(world: Communicator) -> None:
        mesh = Mesh(world, case.shape)
        layer = case.build(mesh)
        load_plain_(layer, {name: w.detach() for name, w in plain.weights.items()}, mesh)
        if plain.bias is not None and layer.gate.e_score_correction_bias is not None:
            layer.gate.e_score_correction_bias.copy_(plain.bias)
        own = case.part(mesh, hidden.detach()).clone().requires_grad_()
        mask = None if valid is None else case.part(mesh, valid)
        output, report = layer(own, mask, positions_S=case.own_columns(mesh))
        loss = (output * case.part(mesh, upstream)).sum()
        (loss + 0.1 * report.balance + 0.01 * report.z).backward()
        losses = torch.stack([report.balance, report.z]).detach()
        mesh.communicator("dp", "cp").all_reduce(losses).wait()
        assert own.grad is not None
        _compare("output", output.detach(), case.part(mesh, expected.output))
        _compare("input gradient", own.grad, case.part(mesh, expected.input_gradient))
        _compare("losses", losses, torch.tensor(expected.losses, dtype=torch.float64))
        for name, gradient in sum_gradients(layer, mesh).items():
            _compare(name, gradient, expected.gradients[name])

    LocalWorld(case.shape.world_size).run(run)


def sum_gradients(layer: nn.Module, mesh: Mesh) -> dict[str, torch.Tensor]:
    """Return every gradient whole: summed as its placement says, zero where it is elsewhere."""
    placements = placements_of(layer)
    found: dict[str, torch.Tensor] = {}
    for name, parameter in layer.named_parameters():
        placement = placements[name]
        assert parameter.grad is not None, f"{name} has no gradient"
        gradient = parameter.grad.clone()
        for axis in placement.reduction_axes:
            mesh.communicator(axis).all_reduce(gradient).wait()
        spec = shard_spec(name, placement, mesh)
        whole = torch.zeros(spec.global_shape, dtype=gradient.dtype)
        if all(mesh.coordinate(axis) == 0 for axis in spec.replicated):
            spec.insert(gradient.flatten(), whole)
        mesh.world.all_reduce(whole).wait()
        found[name] = whole
    return found


def _compute_plain(
    case: ExpertCase,
    plain: PlainMixture,
    hidden: torch.Tensor,
    upstream: torch.Tensor,
    valid: torch.Tensor | None,
) -> _Expected:
    dp = case.shape.dp
    masks = [None] * dp if valid is None else valid.chunk(dp)
    outputs, balances, zs = zip(
        *(plain(rows, mask) for rows, mask in zip(hidden.chunk(dp), masks, strict=True)),
        strict=True,
    )
    output = torch.cat(outputs)
    balance, z = torch.stack(balances).sum(), torch.stack(zs).sum()
    # The last term is for batches of nothing but padding.
    loss = (output * upstream).sum() + 0.0 * hidden.sum() + 0.1 * balance + 0.01 * z
    given, *gradients = torch.autograd.grad(
        loss, [hidden, *plain.weights.values()], materialize_grads=True
    )
    return _Expected(
        output.detach(),
        given,
        dict(zip(plain.weights, gradients, strict=True)),
        (balance.item(), z.item()),
    )


def _compare(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    # Sums of some hundred terms of order one, in float64.
    torch.testing.assert_close(
        actual, expected, rtol=1e-11, atol=1e-11, msg=lambda text: f"{name}: {text}"
    )


@st.composite
def expert_cases(draw: st.DrawFn, max_ranks: int = 8) -> ExpertCase:
    """Draw layers, rules and meshes of at most so many ranks, in both views."""
    dp, cp, tp = draw(
        st.sampled_from(
            [
                sizes
                for sizes in _sizes((1, 2, 3, 4), (1, 2), (1, 2, 3, 4))
                if math.prod(sizes) <= max_ranks
            ]
        )
    )
    stage = dp * cp * tp
    etp = draw(st.sampled_from([n for n in (1, 2, 4) if stage % n == 0]))
    ep = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if stage % (etp * n) == 0]))
    cut = draw(st.booleans())
    shared = draw(st.sampled_from([None, 1, 3]))
    return ExpertCase(
        layout=f"dp={dp},cp={cp},tp={tp},ep={ep},etp={etp}",
        routing=draw(routings(ep)),
        batch=dp * draw(st.integers(1, 2)),
        length=draw(st.integers(1, 6)),
        width=draw(st.integers(1, 5)),
        expert_width=etp * draw(st.integers(1, 2)),
        shared_width=shared,
        shared_gate=shared is not None and draw(st.booleans()),
        sequence=cut,
        zigzag=draw(st.booleans()),
        padding=draw(st.booleans()),
        regroups=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
    )


@st.composite
def routings(draw: st.DrawFn, ep: int) -> Routing:
    """Draw a rule whose experts ``ep`` ranks can share."""
    groups = draw(st.sampled_from([1, 1, 2]))
    num_experts = ep * groups * draw(st.integers(1, 3))
    top_groups = draw(st.integers(1, groups))
    return Routing(
        num_experts,
        draw(st.integers(1, min(4, num_experts // groups * top_groups))),
        score=draw(st.sampled_from(["softmax", "sigmoid"])),
        normalize=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        groups=groups,
        top_groups=top_groups,
        group_best=draw(st.integers(1, 2)),
        biased=draw(st.booleans()),
        capacity_factor=draw(st.sampled_from([None, 0.5, 1.0, 1.3])),
        scope=draw(st.sampled_from(["sequence", "microbatch"])),
    )


def _sizes(*choices: tuple[int, ...]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for options in choices:
        found = [(*sizes, size) for sizes in found for size in options]
    return found
