"""Gathering parts of different sizes from all ranks, on every communicator alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainwright.collectives.calls import describe_dtype
from trainwright.collectives.checks import check_timeout
from trainwright.collectives.errors import UsageError
from trainwright.collectives.headers import Header, blank_headers, digest_of, tell_groups
from trainwright.collectives.protocol import Communicator, Work
from trainwright.collectives.staging import readable

_REFUSED = -1


def all_gather_uneven(
    comm: Communicator, input: torch.Tensor, *, timeout_s: float | None = None
) -> tuple[torch.Tensor, list[int]]:
    """Concatenate every rank's rows along dim 0, however many each has.

    Args:
        comm: The ranks.
        input: [n, ...] with any n >= 0 on each rank, the rest of the shape and the dtype alike on
            all; a scalar counts as one row.
        timeout_s: How long each of the two steps waits for the others.

    Returns:
        The rows of all ranks in rank order [n0 + n1 + ..., ...], contiguous, and their numbers
        [n0, n1, ...]; the same on every rank.

    Raises:
        UsageError: Ranks differ in dtype or in the shape of a row, or some rank did not pass a
            tensor that can travel; the same text on every rank. The communicator works on.

    Communicates:
        All-gather of 256 bytes a rank with the sizes, then a broadcast of each rank's rows, all
        started together: of n ranks each receives what the others have.
    """
    check_timeout("all_gather_uneven", timeout_s)
    source: torch.Tensor | None = None
    try:
        source = readable("all_gather_uneven", input, comm.device)
        source = source.view(1) if source.ndim == 0 else source
        row = f"rows {tuple(source.shape[1:])} {describe_dtype(source.dtype)}"
        header = Header(digest_of(row), f"came with {row}", source.shape[0])
    except UsageError as error:
        header = Header(0, f"cannot take part: {error}", _REFUSED)
    headers = gather_headers(comm, header, timeout_s)
    said = {rank: other.text for rank, other in enumerate(headers)}
    refused = {rank: said[rank] for rank, other in enumerate(headers) if other.number == _REFUSED}
    if refused:
        raise UsageError(f"all_gather_uneven: {tell_groups(refused)}")
    if len({other.digest for other in headers}) > 1:
        raise UsageError(
            f"all_gather_uneven: only the number of rows may differ between ranks, but "
            f"{tell_groups(said)}"
        )
    assert source is not None
    counts = [other.number for other in headers]
    return gather_rows(comm, source, counts, timeout_s), counts


def gather_rows(
    comm: Communicator, source: torch.Tensor, counts: Sequence[int], timeout_s: float | None
) -> torch.Tensor:
    """Concatenate the ranks' rows, the numbers of which are known everywhere.

    Args:
        comm: The ranks.
        source: This rank's rows, contiguous [counts[rank], ...].
        counts: The number of rows of each rank.
        timeout_s: How long to wait for the others.

    Communicates:
        A broadcast from each rank that has rows, started together.
    """
    whole = source.new_empty((sum(counts), *source.shape[1:]))
    parts = torch.split(whole, list(counts))
    with torch.no_grad():
        parts[comm.rank].copy_(source)
    # Broadcasts and not messages: those could meet messages of the caller.
    works: list[Work] = []
    with comm.coalesce():
        for root, part in enumerate(parts):
            if part.numel():
                works.append(comm.broadcast(part, root, timeout_s=timeout_s))
    for work in works:
        work.wait()
    return whole


def gather_headers(comm: Communicator, header: Header, timeout_s: float | None) -> list[Header]:
    """Return what every rank tells, by rank.

    Communicates:
        All-gather of 256 bytes a rank.
    """
    mine = header.to_tensor(comm.device).view(1, -1)
    table = blank_headers(comm.size, comm.device)
    comm.all_gather(table, mine, timeout_s=timeout_s).wait()
    headers = [Header.from_tensor(row) for row in table.cpu()]
    return [header for header in headers if header is not None]
