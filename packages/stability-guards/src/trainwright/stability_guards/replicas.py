"""Silent corruption: weights that should be the same on several ranks and are not.

Comparing checksums of the bits finds a single flipped bit for certain; comparing norms would not.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

import attrs
import torch

from trainwright.collectives import Communicator
from trainwright.stability_guards.errors import GuardError

_CHUNK_WORDS = 4096  # 32 KiB are summed at a time


@attrs.frozen
class Mismatch:
    """A tensor whose bits are not the same on all ranks.

    Args:
        name: of the tensor.
        ranks: those that differ from the majority, within the communicator; where no value has a
            majority, as with two ranks, all of them.
        has_majority: whether more than half of the ranks agree.
    """

    name: str
    ranks: tuple[int, ...]
    has_majority: bool

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        if self.has_majority:
            return f"{self.name} differs on rank {ranks}"
        return f"{self.name} differs among ranks {ranks}, of which no majority agrees"


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number that follows from the bits of a tensor in logical order.

    Any single change within one aligned chunk of 32 KiB that changes the sum of its 64-bit words
    changes it, so a flipped bit always does; chunks have odd weights of their own, so that their
    order counts. Zero and negative zero differ, NaNs are equal if their bits are.

    Returns:
        0-d int64 on the tensor's device; the host does not wait.
    """
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = octets.numel() // 8 * 8
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if whole:
        head = octets[:whole]
        if head.storage_offset() % 8:
            head = head.clone()
        total = _weighted_sum(head.view(torch.int64))
    if whole < octets.numel():
        last = torch.zeros(8, dtype=torch.uint8, device=tensor.device)
        last[: octets.numel() - whole] = octets[whole:]
        # An odd weight that no chunk has.
        total = total - last.view(torch.int64).squeeze()
    return total


def checksums(named: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the `checksum` of each tensor, in the mapping's order, int64 [tensors]."""
    if not named:
        return torch.zeros(0, dtype=torch.int64)
    found = [checksum(tensor) for tensor in named.values()]
    return torch.stack([value.to(found[0].device) for value in found])


def compare_replicas(
    named: Mapping[str, torch.Tensor], communicator: Communicator
) -> tuple[Mismatch, ...]:
    """Find the tensors that are not bit for bit the same on all ranks, and the odd ranks.

    Call it every so many steps, after the update, at the same place on every rank of the
    communicator, such as data-parallel ranks with whole weights. What it finds is the same on each
    of them; a rank of another group learns of it by a local verdict in the next step's all-reduce.

    Args:
        named: the tensors by name, the same names in the same order on every rank.
        communicator: ranks that should hold the same.

    Returns:
        One entry a tensor that differs; empty where all is well.

    Raises:
        GuardError: names, shapes or dtypes differ between ranks; on every rank alike.

    Communicates:
        One all-gather of 16 bytes a rank; only where something differs one more of 8 bytes a
        tensor. The host waits.
    """
    device = communicator.device
    sums = checksums(named).to(device)
    weights = 2 * torch.arange(len(named), dtype=torch.int64, device=device) + 1
    digest = torch.stack([(sums * weights).sum(), _names_digest(named).to(device)])
    digests = _gathered(digest, communicator)
    if len({names for _, names in digests}) > 1:
        odd = _odd_ranks([names for _, names in digests])[0]
        raise GuardError(
            f"ranks {', '.join(map(str, odd))} of {communicator.name} hold tensors of other names, "
            "shapes or dtypes than the others; compare only what is replicated, in one order"
        )
    if len({bits for bits, _ in digests}) == 1:
        return ()
    rows = _gathered(sums, communicator)
    found = []
    for place, name in enumerate(named):
        values = [row[place] for row in rows]
        if len(set(values)) > 1:
            found.append(Mismatch(name, *_odd_ranks(values)))
    return tuple(found)


def _weighted_sum(words: torch.Tensor) -> torch.Tensor:
    whole = words.numel() // _CHUNK_WORDS
    sums = [words[: whole * _CHUNK_WORDS].view(whole, _CHUNK_WORDS).sum(1)]
    if whole * _CHUNK_WORDS < words.numel():
        sums.append(words[whole * _CHUNK_WORDS :].sum()[None])
    chunks = torch.cat(sums)
    weights = 2 * torch.arange(chunks.numel(), dtype=torch.int64, device=words.device) + 1
    # Integers wrap, so the sum is one modulo 2^64, in which odd weights lose nothing.
    return (chunks * weights).sum()


def _names_digest(named: Mapping[str, torch.Tensor]) -> torch.Tensor:
    text = ";".join(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in named.items())
    octets = hashlib.sha256(text.encode()).digest()[:8]
    return torch.tensor(int.from_bytes(octets, "little", signed=True), dtype=torch.int64)


def _gathered(row: torch.Tensor, communicator: Communicator) -> list[tuple[int, ...]]:
    rows = torch.empty(communicator.size * row.numel(), dtype=torch.int64, device=row.device)
    communicator.all_gather(rows, row).wait()
    return [tuple(values) for values in rows.view(communicator.size, -1).tolist()]


def _odd_ranks(values: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    value, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return tuple(range(len(values))), False
    return tuple(rank for rank, other in enumerate(values) if other != value), True
