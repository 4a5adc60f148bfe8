"""Tokens travel to the ranks of their experts and back, in uneven parts."""

# Shapes: N tokens, K experts of a token, A rows sent, R rows received, D model.

from __future__ import annotations

import torch

from trainwright.collectives import differentiable
from trainwright.sharding.expert.ranks import ExpertRanks
from trainwright.sharding.expert.rows import permute
from trainwright.sharding.expert.travel import send_tokens, sum_returned
from trainwright.sharding.expert.trip import Trip


def dispatch(hidden_ND: torch.Tensor, trip: Trip, ranks: ExpertRanks) -> torch.Tensor:
    """Send each token to the ranks of its experts.

    Args:
        hidden_ND: This rank's tokens.
        trip: Where they go.
        ranks: The ranks.

    Returns:
        The rows for this rank's experts [R, D], in blocks of ``trip.sizes``.

    Communicates:
        One all-to-all over ep, and with etp > 1 one over etp, in which each rank's rows go to all;
        backward the same.
    """
    rows = send_tokens(hidden_ND, trip, ranks)
    etp = ranks.etp
    if etp.size > 1:
        own = (trip.shared[etp.rank],) * etp.size
        rows = differentiable.all_to_all(rows.repeat(etp.size, 1), etp, trip.shared, own)
    if trip.regroup is None or trip.inverse is None:
        return rows
    return permute(rows, trip.regroup, trip.inverse)


def combine(
    rows_RD: torch.Tensor, weights_NK: torch.Tensor, trip: Trip, ranks: ExpertRanks
) -> torch.Tensor:
    """Bring what the experts computed back to the tokens, and add it up.

    Args:
        rows_RD: Of this rank's experts, in the order of `dispatch`; with etp > 1 this rank's terms.
        weights_NK: Of each choice.
        trip: As for `dispatch`.
        ranks: The ranks.

    Returns:
        The weighted sum of what was computed for each token [N, D].

    Communicates:
        As `dispatch`.
    """
    rows = rows_RD
    if trip.regroup is not None and trip.inverse is not None:
        rows = permute(rows, trip.inverse, trip.regroup)
    etp = ranks.etp
    if etp.size > 1:
        own = trip.shared[etp.rank]
        terms = differentiable.all_to_all(rows, etp, (own,) * etp.size, trip.shared)
        rows = terms.view(etp.size, own, rows.shape[1]).sum(0)
    return sum_returned(rows, weights_NK, trip, ranks)
