"""Short fixed-size notes that ranks send each other about what they are going to do."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping

import attrs
import torch

HEADER_BYTES = 256

# Sums of hashes below this, over some ten thousand ranks, stay below 2**63.
HASHES = 2**48

# Whether it has come, digest, number, length of the text.
_FIELDS = struct.Struct("<?QqH")
_TEXT_BYTES = HEADER_BYTES - _FIELDS.size


@attrs.frozen
class Header:
    """A note of one rank.

    Args:
        digest: A hash of what must be alike on the ranks.
        text: What to tell of the rank; cut after about 235 bytes.
        number: A number that goes with it.
    """

    digest: int
    text: str
    number: int = 0

    def to_tensor(self, device: torch.device) -> torch.Tensor:
        """Return it as uint8 [256]."""
        said = self.text.encode()[:_TEXT_BYTES]
        fields = _FIELDS.pack(True, self.digest, self.number, len(said))
        data = bytearray((fields + said).ljust(HEADER_BYTES, b"\0"))
        return torch.frombuffer(data, dtype=torch.uint8).to(device)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> Header | None:
        """Read what `to_tensor` wrote, or return None where nothing has come yet."""
        data = bytes(tensor.tolist())
        has_come, digest, number, length = _FIELDS.unpack_from(data)
        if not has_come:
            return None
        text = data[_FIELDS.size : _FIELDS.size + length].decode(errors="replace")
        return cls(digest, text, number)


def blank_headers(count: int, device: torch.device) -> torch.Tensor:
    """Return memory for headers to come, uint8 [count, 256]."""
    return torch.zeros((count, HEADER_BYTES), dtype=torch.uint8, device=device)


def digest_of(text: str) -> int:
    """Return a hash of 64 bits that is the same in all processes."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def tell_groups(said: Mapping[int, str]) -> str:
    """Say which ranks said what: "rank 3 all_gather ...; ranks 0-2 reduce_scatter ...".

    The fewest ranks come first, as they are the likely culprits.
    """
    groups: dict[str, list[int]] = {}
    for rank in sorted(said):
        groups.setdefault(said[rank], []).append(rank)
    ordered = sorted(groups.items(), key=lambda group: (len(group[1]), group[1]))
    return "; ".join(f"{name_ranks(ranks)} {text}" for text, ranks in ordered)


def name_ranks(ranks: Iterable[int]) -> str:
    """Name ranks shortly: "rank 3" or "ranks 0-2, 5"."""
    chosen = sorted(ranks)
    runs: list[list[int]] = []
    for rank in chosen:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"{'rank' if len(chosen) == 1 else 'ranks'} {', '.join(parts)}"
