"""Contiguous stand-ins for strided tensors, which transports would misread."""

from __future__ import annotations

import torch
from torch.autograd.graph import increment_version

from trainwright.collectives.checks import check_tensor, check_writable

# The caller's tensor, and the contiguous one that is copied into it at the end.
Copies = list[tuple[torch.Tensor, torch.Tensor]]


def readable(what: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a checked, contiguous tensor of the same values."""
    tensor = check_tensor(what, tensor, device)
    return tensor if _is_plain(tensor) else _plain(tensor)


def writable(
    what: str, tensor: torch.Tensor, device: torch.device, copies: Copies, keep: bool = False
) -> torch.Tensor:
    """Return a checked, contiguous tensor to write to, and note in ``copies`` if it stands in.

    With ``keep`` it starts with the values of ``tensor``.
    """
    tensor = check_tensor(what, tensor, device)
    if _is_plain(tensor):
        _announce_write(tensor)
        if not tensor.is_inference():
            # Transports write memory behind autograd's back; what a backward pass needs must show.
            increment_version(tensor)
        return tensor
    check_writable(what, tensor)
    if keep:
        inner = _plain(tensor)
    else:
        inner = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    copies.append((tensor, inner))
    return inner


def _announce_write(tensor: torch.Tensor) -> None:
    """Let dispatch modes of this thread see that a tensor changes, while it is what it was.

    Transports, and ranks that are threads, write it where no mode of the caller looks; but a mode
    that keeps results for a recomputation copies those that are about to change.
    """
    if torch._C._len_torch_dispatch_stack() and not tensor.is_inference():
        # Nothing of the same memory is written, and by data: the tensor counts no change of it.
        tensor.data.view(-1)[:0].zero_()


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous()
