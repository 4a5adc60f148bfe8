"""A layer of experts: route, dispatch, compute, combine."""

# Shapes: B batch, S sequence, D model, N tokens that this rank routes, K experts of a token,
# E experts; B, S and N are this rank's part.

from __future__ import annotations

from typing import Unpack

import torch
from torch import nn

from trainwright.collectives import differentiable, random
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.expert.decision import Decision, decide_routing
from trainwright.sharding.expert.exchange import combine, dispatch
from trainwright.sharding.expert.experts import Experts
from trainwright.sharding.expert.ranks import ExpertRanks
from trainwright.sharding.expert.replay import decide
from trainwright.sharding.expert.report import RoutingReport
from trainwright.sharding.expert.router import Router
from trainwright.sharding.expert.routing import Routing
from trainwright.sharding.expert.shared import SharedExpert
from trainwright.sharding.expert.statistics import balance_terms, z_terms
from trainwright.sharding.expert.tokens import TokenCut, Tokens
from trainwright.sharding.mesh import Mesh
from trainwright.sharding.placement.parameters import ParameterPlacement
from trainwright.sharding.tensor.initial import draw_parameter_
from trainwright.sharding.tensor.linear import TensorOptions
from trainwright.sharding.tensor.replicated import place_partial_
from trainwright.sharding.tensor.sequence import SequenceSharding


class MixtureOfExperts(nn.Module):
    """Sends each token to a few of many feed-forward blocks and adds what they compute.

    Every rank routes other tokens: over tp they are cut here, unless ``sequence`` says that they
    are cut already. Experts lie on the expert view of the mesh (edp, ep, etp), whatever the dense
    one is. Parameters are named as in Hugging Face's modules: ``gate.weight``,
    ``experts.gate_up_proj``, ``experts.down_proj``, ``shared_expert.up_proj.weight`` and so on,
    ``shared_expert_gate.weight``; all are zero until drawn or loaded.

    Args:
        width: D.
        expert_width: Features of one expert.
        routing: The rule.
        mesh: The ranks.
        shared_width: Features of an expert that every token visits; None: there is none.
        shared_gate: Whether that expert's output is multiplied by a sigmoid of its own.
        sequence: How positions are cut over tp, in dim 1; None where every tp rank has them all.
        options: ``device`` and ``dtype`` of the parameters.

    Raises:
        ShardingError: ep does not divide the experts or etp their features, ``sequence`` is not
            dim 1, or there is a gate without a shared expert.

    Communicates:
        Forward one all-to-all of counts and two of rows over ep, backward two of rows; with etp > 1
        as many again over etp. Over cp * tp one all-reduce of counts, and with a capacity one
        uneven all-gather. With tp > 1 and no ``sequence`` one all-gather of the output, backward
        one of the input's gradient; one all-reduce of 16 bytes for the losses.

    Source:
        Shazeer et al. (2017); Lepikhin et al., GShard (2020); Fedus et al., Switch Transformers
        (2021); Gale et al., MegaBlocks (2022), for dropless.
    """

    shared_expert: SharedExpert | None
    shared_expert_gate: nn.Linear | None
    _chosen: torch.Tensor | None

    def __init__(
        self,
        width: int,
        expert_width: int,
        routing: Routing,
        mesh: Mesh,
        *,
        shared_width: int | None = None,
        shared_gate: bool = False,
        sequence: SequenceSharding | None = None,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        if sequence is not None and sequence.dim != 1:
            raise ShardingError(f"a layer of experts has positions in dim 1, got {sequence}")
        if shared_gate and shared_width is None:
            raise ShardingError("shared_gate=True needs a shared expert: give it a shared_width")
        self.width = width
        self.routing = routing
        self.ranks = ranks = ExpertRanks.of(mesh)
        self.sequence = sequence
        self.gate = Router(routing, width, ranks.tp, **options)
        self.experts = Experts(
            routing.num_experts, width, expert_width, ranks.ep, ranks.etp, **options
        )
        self.shared_expert = self.shared_expert_gate = None
        if shared_width is not None:
            self.shared_expert = SharedExpert(width, shared_width, ranks.tp, sequence, **options)
        if shared_gate:
            self.shared_expert_gate = nn.Linear(width, 1, bias=False, **options)
            if sequence is not None:
                place_partial_(self.shared_expert_gate)
        self._chosen = None  # no buffer: what is built on the meta device has no zeros

    def forward(
        self,
        hidden_BSD: torch.Tensor,
        valid_BS: torch.Tensor | None = None,
        *,
        positions_S: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, RoutingReport]:
        """Return the output and what was routed.

        Args:
            hidden_BSD: This rank's sequences and positions.
            valid_BS: bool; False marks padding, which visits no expert, counts nowhere and has
                output and gradient 0, whatever its values. None: all are valid.
            positions_S: int64, where each column stands in the sequence. With a capacity it says
                who comes first, and is needed where cp cuts sequences.

        Returns:
            The output [B, S, D] in the input's dtype, and the report.

        Raises:
            ShardingError: Shapes do not fit, or ``positions_S`` is needed.
        """
        self._check(hidden_BSD, valid_BS, positions_S)
        if valid_BS is not None:
            # Not by a factor: what stands in padding may not be finite.
            hidden_BSD = hidden_BSD.masked_fill(~valid_BS[..., None], 0.0)
        cut = TokenCut.of(hidden_BSD.shape, self.ranks.tp, self.sequence)
        tokens = cut.tokens(valid_BS, positions_S, self.routing.scope, hidden_BSD.device)
        hidden_ND = cut.take(hidden_BSD)
        logits_NE = self.gate(hidden_ND)
        decision = decide(self, lambda: self._decide(logits_NE.detach(), tokens))
        report = self._report(logits_NE, tokens, decision)
        rows_RD = dispatch(hidden_ND, decision.trip, self.ranks)
        rows_RD = self.experts(rows_RD, decision.trip.sizes)
        weights_NK = self.routing.weights(logits_NE, decision.experts)
        routed_ND = combine(rows_RD, weights_NK, decision.trip, self.ranks)
        output_BSD = cut.join(routed_ND.to(hidden_BSD.dtype))
        if self.shared_expert is not None:
            output_BSD = output_BSD + self._share(self.shared_expert, hidden_BSD, valid_BS)
        return output_BSD, report

    def reset_parameters(self, key: random.Key, std: float) -> None:
        """Draw all weights by place, each under the key's name and its own; biases are zero."""

        def own(name: str) -> random.Key:
            return random.Key(key.seed, f"{key.name}.{name}", key.step)

        self.gate.reset_parameters(own("gate.weight"), std)
        self.experts.reset_parameters(own("experts"), std)
        if self.shared_expert is not None:
            self.shared_expert.reset_parameters(own("shared_expert"), std)
        if self.shared_expert_gate is not None:
            gate = self.shared_expert_gate
            placement = ParameterPlacement.replicated(gate.weight.shape)
            draw_parameter_(gate.weight, placement, own("shared_expert_gate.weight"), std)

    @property
    def step_counts(self) -> torch.Tensor:
        """int64 [E]: this rank's choices in training mode since `forget_counts`."""
        if self._chosen is not None:
            return self._chosen
        weight = self.gate.weight
        return torch.zeros(weight.shape[0], dtype=torch.int64, device=weight.device)

    def forget_counts(self) -> None:
        """Begin to count anew."""
        self._chosen = None

    def extra_repr(self) -> str:
        """Say the rule."""
        return str(self.routing)

    def _decide(self, logits_NE: torch.Tensor, tokens: Tokens) -> Decision:
        bias_E = self.gate.e_score_correction_bias
        decision = decide_routing(self.routing, logits_NE, bias_E, tokens, self.ranks)
        if self.training:
            own = decision.counts.own
            self._chosen = own.clone() if self._chosen is None else self._chosen + own
        return decision

    def _report(self, logits_NE: torch.Tensor, tokens: Tokens, decision: Decision) -> RoutingReport:
        balance = balance_terms(self.routing, logits_NE, decision.counts, tokens)
        terms = torch.stack([balance, z_terms(logits_NE, tokens)])
        sums = differentiable.partial_to_replicate(terms, self.ranks.tp)
        return RoutingReport(sums[0], sums[1], decision.counts.own, decision.dropped)

    def _share(
        self, expert: SharedExpert, hidden_BSD: torch.Tensor, valid_BS: torch.Tensor | None
    ) -> torch.Tensor:
        output: torch.Tensor = expert(hidden_BSD)
        if self.shared_expert_gate is not None:
            output = output * self.shared_expert_gate(hidden_BSD).sigmoid()
        return output if valid_BS is None else output.masked_fill(~valid_BS[..., None], 0.0)

    def _check(
        self,
        hidden_BSD: torch.Tensor,
        valid_BS: torch.Tensor | None,
        positions_S: torch.Tensor | None,
    ) -> None:
        shape = tuple(hidden_BSD.shape)
        if len(shape) != 3 or shape[2] != self.width:
            raise ShardingError(f"hidden must be [B, S, {self.width}], got shape {shape}")
        if self.sequence is not None:
            self.sequence.length_of(hidden_BSD, self.ranks.tp)
        if valid_BS is not None and (
            valid_BS.dtype != torch.bool or tuple(valid_BS.shape) != shape[:2]
        ):
            raise ShardingError(
                f"valid must be bool of shape {shape[:2]}, one a position of hidden, got "
                f"{valid_BS.dtype} of shape {tuple(valid_BS.shape)}"
            )
        if positions_S is not None and (
            positions_S.is_floating_point() or tuple(positions_S.shape) != shape[1:2]
        ):
            raise ShardingError(
                f"positions must be integers of shape {shape[1:2]}, one a column of hidden, got "
                f"{positions_S.dtype} of shape {tuple(positions_S.shape)}"
            )
        if positions_S is None and self.ranks.cp_size > 1 and self.routing.capacity_factor:
            raise ShardingError(
                f"with capacity_factor={self.routing.capacity_factor} and cp={self.ranks.cp_size} "
                "the layer must know who comes first: pass positions_S, int64, where each column "
                "of hidden stands in its sequence"
            )
