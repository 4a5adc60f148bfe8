"""Memory for what travels between ranks: where its communicator reads and writes it directly."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trainwright.collectives import Communicator, empty_on


def travelling(
    comms: Iterable[Communicator], numel: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a flat tensor without values, where the first communicator with peers wants it.

    Ordinary memory where there is none. Parts of one communicator share their memory.
    """
    for comm in comms:
        # What is on another device is refused when it travels, by name.
        if comm.size > 1 and comm.device == device:
            return empty_on(comm, (numel,), dtype=dtype)
    return torch.empty(numel, dtype=dtype, device=device)
