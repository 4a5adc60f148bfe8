"""What keeps states away from the device, and what an update of them goes by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import nn

from trainwright.collectives import Work
from trainwright.sharding.offload.ledger import Ledger


class Slot(Protocol):
    """Elements that are kept away from the device."""

    @property
    def tensor(self) -> torch.Tensor:
        """All of them, flat; the host reads and writes them there at any time between steps."""
        ...


class Store(Protocol):
    """A place for elements, such as `HostMemory` or a `FileStore`.

    Laws: what was written to a slot is read from it, bit for bit; nothing that was allocated is
    changed where another allocation fails; `ledger` has counted exactly the host memory it holds.
    """

    @property
    def ledger(self) -> Ledger:
        """Counts the host memory that it holds."""
        ...

    def reserve(self, sizes: Iterable[int]) -> None:
        """Make sure that slots of these sizes in bytes can be allocated."""
        ...

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Slot:
        """Return a place for elements that come from a device and go to it."""
        ...


class StepUnit(Protocol):
    """Parameters whose states are brought, updated and put back together."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """What the optimizer updates, parts of `masters`."""
        ...

    @property
    def masters(self) -> Slot:
        """Where the elements of the parameters are kept."""
        ...

    @property
    def gradients(self) -> Slot:
        """Where their gradients are kept, laid out as the masters."""
        ...

    @property
    def work_bytes(self) -> int:
        """Host memory that `give_back` needs beside the masters."""
        ...

    def show(self, masters: torch.Tensor) -> None:
        """Let the parameters be parts of a tensor, which has all elements of the masters."""
        ...

    def show_gradients(self, gradients: torch.Tensor | None) -> None:
        """Let the parameters' gradients be parts of a copy of `gradients`, or of these again.

        Gradients that somebody has replaced stay what they are.
        """
        ...

    def give_back(self, masters: torch.Tensor, work: torch.Tensor) -> Work:
        """Start making the module's weights of updated masters.

        Args:
            masters: Belong to it until it is waited for, and so does ``work``.
            work: `work_bytes` of memory.
        """
        ...
