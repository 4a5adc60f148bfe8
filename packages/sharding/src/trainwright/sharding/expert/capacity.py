"""Which choices an expert of limited capacity takes: the first ones of each group of tokens."""

# Shapes: N tokens of this rank, K experts of a token, E experts, G groups.

from __future__ import annotations

import torch

from trainwright.collectives import Communicator, all_gather_uneven
from trainwright.sharding.expert.tokens import Tokens


def drop_late_choices(
    experts_NK: torch.Tensor,
    tokens: Tokens,
    capacities_G: torch.Tensor,
    num_experts: int,
    sequence: Communicator,
) -> torch.Tensor:
    """Return the choices with E in place of those that come after an expert is full.

    A choice is early if few choices of its expert come before it in its group: those of earlier
    tokens, and earlier ones of the token itself. What happens to a token does not depend on later
    tokens, but for the number of tokens that makes the capacity.

    Args:
        experts_NK: The expert of each choice; E where the token is not valid.
        tokens: Of this rank.
        capacities_G: How many choices each expert takes of a group.
        num_experts: E.
        sequence: The ranks that hold other tokens of the same groups.

    Communicates:
        Over ``sequence`` an uneven all-gather of 8 * (K + 2) bytes a token.
    """
    top_k = experts_NK.shape[1]
    own = torch.cat([tokens.group[:, None], tokens.place[:, None], experts_NK], 1)
    whole, first = own, 0
    if sequence.size > 1:
        whole, numbers = all_gather_uneven(sequence, own)
        first = sum(numbers[: sequence.rank])
    expert = whole[:, 2:]
    queue = (whole[:, :1] * (num_experts + 1) + expert).flatten()
    # Stable sorts, the least important key first: choice, place, then expert and group.
    by_place = whole[:, 1].argsort(stable=True)
    choices = (by_place[:, None] * top_k + torch.arange(top_k, device=own.device)).flatten()
    ordered = choices[queue[choices].argsort(stable=True)]
    queue_in_order = queue[ordered]
    starts = torch.searchsorted(queue_in_order, queue_in_order)
    ahead = torch.empty_like(ordered)
    ahead[ordered] = torch.arange(ordered.numel(), device=own.device) - starts
    limit = capacities_G[whole[:, 0]]
    kept = torch.where(ahead.view_as(expert) < limit[:, None], expert, num_experts)
    return kept[first : first + experts_NK.shape[0]].contiguous()
