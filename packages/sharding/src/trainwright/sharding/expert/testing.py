"""A mixture of experts as plain loops in one process, drawn cases, and the law that joins them."""

# Shapes: B batch, S sequence, D model, F features of an expert, E experts, N tokens of a group.

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import Communicator, LocalWorld, random
from trainwright.sharding.expert.layer import MixtureOfExperts
from trainwright.sharding.expert.routing import Routing
from trainwright.sharding.mesh import Mesh, MeshShape
from trainwright.sharding.placement.parameters import placements_of, shard_spec
from trainwright.sharding.tensor.sequence import SequenceSharding
from trainwright.sharding.testing.laws import load_plain_


@attrs.frozen
class ExpertCase:
    """A layer, its input and the ranks.

    Args:
        layout: The mesh, as `MeshShape.parse` reads it.
        routing: The rule.
        batch: B of the whole batch, a multiple of dp.
        length: S of a whole sequence.
        width: D.
        expert_width: F, a multiple of etp.
        shared_width: As in `MixtureOfExperts`.
        shared_gate: As in `MixtureOfExperts`.
        sequence: Whether positions are cut over tp.
        zigzag: Whether cp rank r has chunks r and 2 * cp - 1 - r.
        padding: How many positions of each sequence are not valid, drawn at random places.
        seed: Of weights and inputs.
    """

    layout: str
    routing: Routing
    batch: int = 4
    length: int = 6
    width: int = 5
    expert_width: int = 4
    shared_width: int | None = None
    shared_gate: bool = False
    sequence: bool = False
    zigzag: bool = False
    padding: bool = False
    seed: int = 0

    @property
    def shape(self) -> MeshShape:
        """The mesh."""
        return MeshShape.parse(self.layout)

    def build(self, mesh: Mesh) -> MixtureOfExperts:
        """Return one rank's layer, in float64, with weights of zero."""
        length = len(self.columns(mesh))
        uneven = SequenceSharding(length=length if length % mesh.size("tp") else None)
        return MixtureOfExperts(
            self.width,
            self.expert_width,
            self.routing,
            mesh,
            shared_width=self.shared_width,
            shared_gate=self.shared_gate,
            sequence=uneven if self.sequence else None,
            dtype=torch.float64,
        )

    def columns(self, mesh: Mesh) -> torch.Tensor:
        """Return the positions of one cp rank."""
        cp, rank = mesh.size("cp"), mesh.coordinate("cp")
        whole = torch.arange(self.length)
        if not self.zigzag:
            return whole.tensor_split(cp)[rank]
        chunks = whole.tensor_split(2 * cp)
        return torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]])

    def part(self, mesh: Mesh, whole: torch.Tensor) -> torch.Tensor:
        """Return one rank's sequences and positions of a whole tensor [B, S, ...]."""
        rows = whole.chunk(mesh.size("dp"))[mesh.coordinate("dp")]
        return rows[:, self.own_columns(mesh)]

    def own_columns(self, mesh: Mesh) -> torch.Tensor:
        """Return the positions of one rank."""
        columns = self.columns(mesh)
        if not self.sequence:
            return columns
        tp = mesh.size("tp")
        most = -(-len(columns) // tp)
        return columns[mesh.coordinate("tp") * most :][:most]

    def draw(self, name: str, *shape: int) -> torch.Tensor:
        """Return normal numbers."""
        return random.normal(random.Key(self.seed, name), shape, dtype=torch.float64)

    def valid(self) -> torch.Tensor | None:
        """Return which positions of the whole batch [B, S] are valid, None for all."""
        if not self.padding:
            return None
        return self.draw("valid", self.batch, self.length) > -0.4


class PlainMixture(nn.Module):
    """The same layer as loops over sequences, tokens and experts, without any communication."""

    def __init__(self, case: ExpertCase) -> None:
        super().__init__()
        self.case = case
        rule, D, F_ = case.routing, case.width, case.expert_width
        shapes = {
            "gate.weight": (rule.num_experts, D),
            "experts.gate_up_proj": (rule.num_experts, 2 * F_, D),
            "experts.down_proj": (rule.num_experts, D, F_),
        }
        if case.shared_width is not None:
            shapes["shared_expert.gate_proj.weight"] = (case.shared_width, D)
            shapes["shared_expert.up_proj.weight"] = (case.shared_width, D)
            shapes["shared_expert.down_proj.weight"] = (D, case.shared_width)
        if case.shared_gate:
            shapes["shared_expert_gate.weight"] = (1, D)
        self.weights = {name: case.draw(name, *shape) for name, shape in shapes.items()}
        for weight in self.weights.values():
            weight.requires_grad_()
        self.bias = case.draw("bias", rule.num_experts) * 0.1 if rule.biased else None

    def forward(
        self, hidden_BSD: torch.Tensor, valid_BS: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return output, balance and z sums of whole sequences (or of one micro-batch)."""
        if valid_BS is None:
            valid_BS = torch.ones(hidden_BSD.shape[:2], dtype=torch.bool)
        rule = self.case.routing
        by_sequence = [[(b, s) for s in range(hidden_BSD.shape[1])] for b in range(len(hidden_BSD))]
        groups = by_sequence
        if rule.scope == "microbatch":
            groups = [[at for group in by_sequence for at in group]]
        output = torch.zeros_like(hidden_BSD)
        balance = z = torch.zeros((), dtype=torch.float64)
        for group in groups:
            real = [at for at in group if valid_BS[at]]
            placed, more, more_z = self._route(hidden_BSD, real)
            output, balance, z = output + placed, balance + more, z + more_z
        return output, balance, z

    def _route(
        self, hidden_BSD: torch.Tensor, group: list[tuple[int, int]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rule, E = self.case.routing, self.case.routing.num_experts
        taken = [0] * E
        asked = [0] * E
        probabilities = torch.zeros(E, dtype=torch.float64)
        z = torch.zeros((), dtype=torch.float64)
        capacity = math.inf
        if rule.capacity_factor is not None:
            capacity = math.ceil(rule.capacity_factor * rule.top_k / E * len(group))
        placed: dict[tuple[int, int], torch.Tensor] = {}
        for at in group:
            token = hidden_BSD[at]
            logits = self.weights["gate.weight"] @ token
            scores = logits.softmax(0) if rule.score == "softmax" else logits.sigmoid()
            probabilities = probabilities + scores / scores.sum()
            z = z + logits.logsumexp(0) ** 2
            chosen = self._choose(scores.detach())
            weights = scores[chosen] / scores[chosen].sum() if rule.normalize else scores[chosen]
            placed[at] = self._shared(token)
            for expert, weight in zip(chosen, weights * rule.scale, strict=True):
                asked[expert] += 1
                if taken[expert] < capacity:
                    taken[expert] += 1
                    placed[at] = placed[at] + weight * self._expert(expert, token)
        choices = max(1, sum(asked))
        share = torch.tensor(asked, dtype=torch.float64) / choices
        return _spread(placed, hidden_BSD), E * (share * probabilities).sum(), z

    def _choose(self, scores: torch.Tensor) -> list[int]:
        rule, E = self.case.routing, self.case.routing.num_experts
        preferred: list[float] = (scores if self.bias is None else scores + self.bias).tolist()
        size = E // rule.groups
        blocks = [range(g * size, (g + 1) * size) for g in range(rule.groups)]

        def worth(block: range) -> float:
            best = sorted((preferred[expert] for expert in block), reverse=True)
            return math.fsum(best[: rule.group_best])

        used = sorted(blocks, key=worth, reverse=True)[: rule.top_groups]
        usable = [expert for block in used for expert in block]
        return sorted(usable, key=lambda expert: -preferred[expert])[: rule.top_k]

    def _expert(self, expert: int, token: torch.Tensor) -> torch.Tensor:
        gate, up = (self.weights["experts.gate_up_proj"][expert] @ token).chunk(2)
        return self.weights["experts.down_proj"][expert] @ (F.silu(gate) * up)

    def _shared(self, token: torch.Tensor) -> torch.Tensor:
        if self.case.shared_width is None:
            return torch.zeros_like(token)
        gate = self.weights["shared_expert.gate_proj.weight"] @ token
        up = self.weights["shared_expert.up_proj.weight"] @ token
        output = self.weights["shared_expert.down_proj.weight"] @ (F.silu(gate) * up)
        if self.case.shared_gate:
            output = output * (self.weights["shared_expert_gate.weight"] @ token).sigmoid()
        return output


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
    return ExpertCase(
        layout=f"dp={dp},cp={cp},tp={tp},ep={ep},etp={etp}",
        routing=draw(routings(ep)),
        batch=dp * draw(st.integers(1, 2)),
        length=draw(st.integers(1, 6)),
        width=draw(st.integers(1, 5)),
        expert_width=etp * draw(st.integers(1, 2)),
        shared_width=draw(st.sampled_from([None, tp])),
        sequence=cut,
        zigzag=draw(st.booleans()),
        padding=draw(st.booleans()),
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
    loss = (output * upstream).sum() + 0.1 * balance + 0.01 * z
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


def _spread(placed: Mapping[tuple[int, int], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    rows = [
        torch.stack(
            [placed.get((b, s), torch.zeros_like(like[b, s])) for s in range(like.shape[1])]
        )
        for b in range(like.shape[0])
    ]
    return torch.stack(rows)


def _sizes(*choices: tuple[int, ...]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for options in choices:
        found = [(*sizes, size) for sizes in found for size in options]
    return found
