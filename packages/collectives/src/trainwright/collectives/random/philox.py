"""Philox-4x32-10 on integer tensors."""

from __future__ import annotations

import torch

from trainwright.collectives.errors import UsageError

_MASK = 0xFFFFFFFF
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox_4x32_10(counter: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return four random 32-bit words for each counter and key.

    Args:
        counter: Int64 ``[..., 4]``, of which the low 32 bits count.
        key: Int64 ``[..., 2]``, of which the low 32 bits count; its other dims broadcast against
            those of ``counter``.

    Returns:
        Int64 ``[..., 4]`` with values 0 to 2**32 - 1.

    Raises:
        UsageError: A dtype or a last dim is different.

    Source:
        Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011), with the
        constants and the test vectors of Random123.
    """
    for name, tensor, words in (("counter", counter, 4), ("key", key, 2)):
        if tensor.dtype != torch.int64 or tensor.ndim == 0 or tensor.shape[-1] != words:
            raise UsageError(
                f"{name} must be int64 with {words} words in its last dim, "
                f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
    leads = counter.shape[:-1], key.shape[:-1]
    batch = torch.broadcast_shapes(*leads)  # type: ignore[no-untyped-call]
    c0, c1, c2, c3 = (counter & _MASK).expand(*batch, 4).unbind(-1)
    k0, k1 = (key & _MASK).expand(*batch, 2).unbind(-1)
    return torch.stack(run_rounds((c0, c1, c2, c3), k0, k1), dim=-1)


def run_rounds(counter: Words, key_low: torch.Tensor | int, key_high: torch.Tensor | int) -> Words:
    """Return the four output words for counters and keys that are words already."""
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        # Of two words, int64 holds the 64 bits of the product, though not their sign. What lies
        # above a word is cut off before the next product, which is the first that sees it.
        product0, product1 = c0 * _FACTORS[0], c2 * _FACTORS[1]
        c0 = (product1 >> 32).bitwise_xor_(c1).bitwise_xor_(key_low).bitwise_and_(_MASK)
        c2 = (product0 >> 32).bitwise_xor_(c3).bitwise_xor_(key_high).bitwise_and_(_MASK)
        c1, c3 = product1, product0
        key_low = (key_low + _KEY_STEPS[0]) & _MASK
        key_high = (key_high + _KEY_STEPS[1]) & _MASK
    return c0, c1.bitwise_and_(_MASK), c2, c3.bitwise_and_(_MASK)
