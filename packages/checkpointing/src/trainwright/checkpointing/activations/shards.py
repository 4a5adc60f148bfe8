"""Keeps tensors that are the same on some ranks as shards, one a rank, and gathers them again."""

from __future__ import annotations

import attrs
import torch

from trainwright.checkpointing.errors import PolicyError, ReplayError
from trainwright.collectives.protocol import Communicator

from .fingerprints import fingerprint
from .strided import Strided, is_plain

_FINGERPRINT_BYTES = 8


@attrs.frozen(eq=False)
class HeldAsShard:
    """This rank's part of a tensor's bytes, with a fingerprint of all of it behind."""

    comm: Communicator
    check: bool
    layout: Strided
    row: torch.Tensor

    @property
    def resident(self) -> tuple[torch.Tensor, ...]:
        """The part."""
        return (self.row,)

    def restore(self) -> torch.Tensor:
        """Return the whole tensor.

        Raises:
            ReplayError: The ranks had different tensors, on all ranks alike.

        Communicates:
            One all-gather: a rank sends its part, a ``1 / size`` of the bytes, and 8 bytes.
        """
        rows = self.row.new_empty((self.comm.size, self.row.numel()))
        self.comm.all_gather(rows.view(-1), self.row).wait()
        found = rows[:, -_FINGERPRINT_BYTES:].contiguous().view(torch.int64)
        if self.check and not bool((found == found[0]).all()):
            raise ReplayError(
                f"an input of shape {list(self.layout.shape)} was to be kept as shards on the "
                f"{self.comm.size} ranks of {self.comm.name}, but the ranks had different ones; "
                "keep only what is replicated over these ranks, or keep it whole"
            )
        flat = rows[:, :-_FINGERPRINT_BYTES].reshape(-1)
        elements = self.layout.empty()
        used = flat[: elements.numel() * elements.element_size()].clone()
        elements.copy_(used.view(elements.dtype).view(elements.shape))
        return self.layout.spread(elements)


@attrs.frozen
class KeepShards:
    """Keeper of tensors that all ranks of a communicator have alike: each keeps its part.

    For inputs of recomputed layers under tensor parallelism without sequence parallelism, as
    ``recompute_all(inputs=KeepShards(tp))``. All ranks must ask for them in the same order, as they
    do where they recompute the same layers.

    Args:
        comm: The ranks. With one, tensors stay as they are.
        check: Compare what the ranks had when it is gathered, which lets a GPU wait for it.

    Source: Rajbhandari et al., ZeRO (arXiv 1910.02054), section 6.1, partitioned activations.
    """

    comm: Communicator = attrs.field()
    check: bool = attrs.field(default=True, kw_only=True)

    @comm.validator
    def _check_comm(self, attribute: object, value: object) -> None:
        if isinstance(value, type) or not isinstance(value, Communicator):
            raise PolicyError(f"KeepShards needs a communicator, got {value!r}")

    def hold(self, tensor: torch.Tensor) -> HeldAsShard | None:
        """Return this rank's part, or None where there is nothing to share out."""
        comm = self.comm
        if comm.size == 1 or not is_plain(tensor) or not tensor.numel():
            return None
        layout = Strided.of(tensor)
        whole = layout.take(tensor).reshape(-1).view(torch.uint8)
        part = _rounded(-(-whole.numel() // comm.size))
        own = whole[comm.rank * part : (comm.rank + 1) * part]
        row = whole.new_zeros(part + _FINGERPRINT_BYTES)
        row[: own.numel()] = own
        row[-_FINGERPRINT_BYTES:] = fingerprint(tensor).view(1).view(torch.uint8)
        return HeldAsShard(comm, self.check, layout, row)


def keep_shards(comm: Communicator, *, check: bool = True) -> KeepShards:
    """Return the keeper that leaves each rank its part of what all have alike; see `KeepShards`."""
    return KeepShards(comm, check=check)


def _rounded(size: int) -> int:
    return -(-size // 8) * 8
