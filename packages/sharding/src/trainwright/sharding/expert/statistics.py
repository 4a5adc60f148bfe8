"""What the tokens of a sequence chose, counted over all ranks that hold a part of it."""

# Shapes: N tokens of this rank, K experts of a token, E experts, G groups of tokens counted alone.

from __future__ import annotations

import attrs
import torch

from trainwright.collectives import Communicator, Work
from trainwright.sharding.expert.routing import Routing
from trainwright.sharding.expert.tokens import Tokens


@attrs.frozen(eq=False)
class Counts:
    """The real choices, before any is dropped, of valid tokens only.

    Args:
        by_group: int64 [G, E], over all ranks of a sequence.
        tokens: int64 [G], the valid tokens of each group, over the same ranks.
        own: int64 [E], this rank's choices.
    """

    by_group: torch.Tensor
    tokens: torch.Tensor
    own: torch.Tensor


def start_counting(
    experts_NK: torch.Tensor, tokens: Tokens, num_experts: int, sequence: Communicator
) -> tuple[Counts, Work | None]:
    """Start to count the choices of each group; the sums are there once the work is waited for.

    Args:
        experts_NK: The expert of each choice; E for tokens that are not valid.
        tokens: Of this rank.
        num_experts: E.
        sequence: The ranks that hold parts of the same sequences.

    Communicates:
        One all-reduce of 8 * G * (E + 1) bytes over ``sequence``.
    """
    width = num_experts + 1
    slot_NK = tokens.group[:, None] * width + experts_NK
    table = experts_NK.new_zeros(tokens.num_groups * width)
    table.index_add_(0, slot_NK.flatten(), torch.ones_like(slot_NK.flatten()))
    table_GX = table.view(tokens.num_groups, width)
    own = table_GX[:, :num_experts].sum(0)
    # The last column has counted the choices of invalid tokens; it carries the valid ones instead.
    top_k = experts_NK.shape[1]
    table_GX[:, num_experts] = table_GX[:, :num_experts].sum(1).div(top_k, rounding_mode="floor")
    work = sequence.all_reduce(table_GX) if sequence.size > 1 else None
    return Counts(table_GX[:, :num_experts], table_GX[:, num_experts], own), work


def balance_terms(
    routing: Routing, logits_NE: torch.Tensor, counts: Counts, tokens: Tokens
) -> torch.Tensor:
    """Return this rank's terms of the balance loss, summed over tokens.

    A group of T valid tokens adds T * E * sum_e f_e * P_e, where f_e is the share of its choices
    that went to expert e and P_e the mean of its probabilities for e: T where experts are evenly
    used, E * T where one has all. Of P only this rank's tokens are added up here, so the sum over
    the ranks of a sequence is the loss. Gradients flow through P.

    Returns:
        A tensor without dims, in at least float32.
    """
    choices_G = (counts.tokens * routing.top_k).clamp(min=1)
    share_GE = counts.by_group / choices_G[:, None].to(logits_NE.dtype)
    terms_NE = routing.probabilities(logits_NE) * share_GE[tokens.group]
    return _of_valid(terms_NE.sum(-1), tokens).sum() * routing.num_experts


def z_terms(logits_NE: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Return this rank's sum over valid tokens of the squared log-sum-exp of the logits.

    Source:
        Zoph et al., ST-MoE (2022), section 3.1, equation 5.
    """
    return _of_valid(logits_NE.logsumexp(-1).square(), tokens).sum()


def _of_valid(values_N: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    return values_N if tokens.valid is None else values_N.masked_fill(~tokens.valid, 0.0)
