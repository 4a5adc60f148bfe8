"""A mixture of experts as plain loops in one process, and the cases it is compared on."""

# Shapes: B batch, S sequence, D model, F features of an expert, E experts, N tokens of a group.

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from trainwright.collectives import random
from trainwright.sharding.expert.layer import MixtureOfExperts
from trainwright.sharding.expert.routing import Routing
from trainwright.sharding.mesh import Mesh, MeshShape
from trainwright.sharding.tensor.sequence import SequenceSharding


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
        regroups: Whether rows are brought into the order of experts, as on an accelerator.
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
    regroups: bool = False
    seed: int = 0

    @property
    def shape(self) -> MeshShape:
        """The mesh."""
        return MeshShape.parse(self.layout)

    def build(self, mesh: Mesh) -> MixtureOfExperts:
        """Return one rank's layer, in float64, with weights of zero."""
        length = len(self.columns(mesh))
        uneven = SequenceSharding(length=length if length % mesh.size("tp") else None)
        layer = MixtureOfExperts(
            self.width,
            self.expert_width,
            self.routing,
            mesh,
            shared_width=self.shared_width,
            shared_gate=self.shared_gate,
            sequence=uneven if self.sequence else None,
            dtype=torch.float64,
        )
        layer.ranks = attrs.evolve(layer.ranks, regroups=self.regroups)
        return layer

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
            factor = Fraction(str(rule.capacity_factor))
            capacity = math.ceil(factor * rule.top_k * len(group) / E)
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


def _spread(placed: Mapping[tuple[int, int], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    rows = [
        torch.stack(
            [placed.get((b, s), torch.zeros_like(like[b, s])) for s in range(like.shape[1])]
        )
        for b in range(like.shape[0])
    ]
    return torch.stack(rows)
