"""Which rows travel where in one forward: agreed on by all ranks in one exchange of counts."""

# Shapes: N tokens, K experts of a token, A rows sent, R rows received, E experts, L local experts.

from __future__ import annotations

import attrs
import torch

from trainwright.sharding.expert.ranks import ExpertRanks
from trainwright.sharding.expert.rows import Choices


@attrs.frozen(eq=False)
class Trip:
    """Which rows travel where in one forward.

    Args:
        choices: Which of the N * K choices are sent, by expert.
        sent: Rows to each rank of ep.
        received: Rows from each rank of ep.
        shared: Rows of each rank of etp, which compute on the rows of all.
        regroup: int64 [R], brings the rows into the order of the local experts; None where they
            stay as they came.
        inverse: int64 [R], brings them back.
        sizes: Rows of each local expert, again and again for each block of rows in which experts
            are in order; they sum to R.
    """

    choices: Choices
    sent: tuple[int, ...]
    received: tuple[int, ...]
    shared: tuple[int, ...]
    regroup: torch.Tensor | None
    inverse: torch.Tensor | None
    sizes: tuple[int, ...]


def plan_trip(experts_NK: torch.Tensor, num_experts: int, ranks: ExpertRanks) -> Trip:
    """Agree with the other ranks on which rows travel where.

    Args:
        experts_NK: int64, the expert of each choice; E where it is not sent.
        num_experts: E, a multiple of ``ranks.ep.size``.
        ranks: The ranks.

    Communicates:
        One all-to-all of 8 * E * etp bytes over ep * etp; then the host reads the counts, once.
    """
    ep, etp = ranks.ep.size, ranks.etp.size
    flat = experts_NK.flatten()
    order = flat.argsort(stable=True)
    counts_E = flat.new_zeros(num_experts + 1).index_add_(0, flat, torch.ones_like(flat))[:-1]
    to_each = counts_E.view(ep, 1, -1).expand(-1, etp, -1).flatten(0, 1).contiguous()
    from_each = torch.empty_like(to_each)
    if ranks.peers.size > 1:
        ranks.peers.all_to_all(from_each, to_each).wait()
    else:
        from_each = to_each
    local = num_experts // ep
    told = torch.cat([to_each, from_each]).tolist()  # the one place where the host waits
    sent = tuple(sum(told[peer * etp]) for peer in range(ep))
    heard = [told[ep * etp + peer] for peer in range(ep * etp)]
    own = ranks.etp.rank
    blocks = [heard[peer * etp + q] for q in range(etp) for peer in range(ep)]  # as they come
    regroup = inverse = None
    if ranks.regroups and ranks.peers.size > 1 and local > 1:
        regroup, inverse = _regroup(from_each.view(ep, etp, local), sum(map(sum, heard)))
        blocks = [[sum(column) for column in zip(*blocks, strict=True)]]
    return Trip(
        choices=Choices.of(order[: sum(sent)], *experts_NK.shape),
        sent=sent,
        received=tuple(sum(heard[peer * etp + own]) for peer in range(ep)),
        shared=tuple(sum(sum(heard[peer * etp + q]) for peer in range(ep)) for q in range(etp)),
        regroup=regroup,
        inverse=inverse,
        sizes=tuple(size for block in blocks for size in block),
    )


def _regroup(counts_pqL: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the order of rows by local expert, and back, for rows that came by etp, ep, expert."""
    ep, etp, local = counts_pqL.shape
    expert_of = torch.arange(local, device=counts_pqL.device).repeat(ep * etp)
    came = counts_pqL.transpose(0, 1).reshape(-1)
    expert_R = torch.repeat_interleave(expert_of, came, output_size=num_rows)
    regroup = expert_R.argsort(stable=True)
    inverse = torch.empty_like(regroup)
    inverse[regroup] = torch.arange(num_rows, device=regroup.device)
    return regroup, inverse
