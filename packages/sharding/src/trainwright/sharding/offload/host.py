"""Host memory as a place for states."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import attrs
import torch

from trainwright.sharding.offload.errors import OffloadError
from trainwright.sharding.offload.ledger import Ledger


@attrs.frozen(eq=False)
class HostSlot:
    """Elements in host memory.

    Args:
        tensor: The memory.
    """

    tensor: torch.Tensor


class HostMemory:
    """Host memory with a count of its own; pinned where a device is to read and write it.

    Args:
        limit_bytes: What it may hold at most; None sets no limit.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.ledger = Ledger("host memory", limit_bytes)

    def reserve(self, sizes: Iterable[int]) -> None:
        """Look whether slots of these sizes stay within the limit; memory is taken by `allocate`.

        Raises:
            OffloadError: The limit would be exceeded.
        """
        self.ledger.check(sum(sizes))

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> HostSlot:
        """Return memory for elements that come from a device and go to it.

        Raises:
            OffloadError: The limit would be exceeded, or the system does not give the memory.
        """
        num_bytes = numel * dtype.itemsize
        self.ledger.take(num_bytes)
        try:
            tensor = torch.empty(numel, dtype=dtype, pin_memory=device.type == "cuda")
        except (RuntimeError, MemoryError) as error:
            self.ledger.give(num_bytes)
            raise OffloadError(
                f"{self.ledger.place} has no {num_bytes:,} bytes for model states ({error}); share "
                "states over more ranks, or offload to a folder"
            ) from error
        slot = HostSlot(tensor)
        weakref.finalize(slot, self.ledger.give, num_bytes).atexit = False
        return slot
