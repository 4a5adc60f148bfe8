"""Draws of integers and of orders, exact to the last bit."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from trainwright.collectives.box import Box
from trainwright.collectives.errors import UsageError

from .elements import as_tensor, at_places, draw_box, prepare, same_bits
from .key import Key
from .places import walk


def integers(
    key: Key,
    shape: Sequence[int],
    low: int,
    high: int,
    *,
    box: Box | None = None,
    dtype: torch.dtype = torch.int64,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return integers in [low, high), each as likely as the others.

    Args:
        key: Which random tensor.
        shape: Shape of the global tensor.
        low: Smallest value.
        high: One more than the largest value; ``high - low`` is below 2**63.
        box: The part of the global tensor to compute; None: all of it.
        dtype: An integer dtype that holds all values.
        device: Where to compute and return it.

    Returns:
        Tensor of ``box.shape``. Numbers that would favour small values are rejected and drawn
        again, which looks at the drawn values (a synchronisation on a GPU) unless ``high - low`` is
        a power of two.

    Raises:
        UsageError: The box is not within ``shape``, there is no value, or the dtype cannot hold it.
    """
    count = operator.index(high) - operator.index(low)
    if not 0 < count < 2**63:
        raise UsageError(f"integers need 0 < high - low < 2**63, got low={low} high={high}")
    _check_integer_dtype(dtype, low, high)
    limit = 2**63 - 2**63 % count
    part, at = prepare(shape, box, device)
    drawn = torch.empty(part.numel, dtype=dtype, device=at)
    for where, indices in walk(shape, part, at):
        bits = at_places(key, indices, at, same_bits)
        attempt = 0
        while limit < 2**63:
            rejected = (bits >= limit).nonzero().squeeze(1)
            if rejected.numel() == 0:
                break
            attempt += 1
            again = as_tensor(indices, at)[rejected]
            bits[rejected] = at_places(key, again, at, same_bits, attempt)
        drawn[where] = bits.remainder_(count).add_(low)
    return drawn.view(part.shape)


def permutation(key: Key, n: int, *, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the numbers 0 to n - 1 in random order.

    The order is that of n random 63-bit numbers, equal ones (of which there are none in all but
    about n**2 / 2**64 cases) in order of their place.

    Args:
        key: Which random order.
        n: How many numbers.
        device: Where to compute and return them.

    Returns:
        Int64 tensor ``[n]``.

    Raises:
        UsageError: ``n`` is negative.
    """
    if n < 0:
        raise UsageError(f"a permutation has n >= 0 elements, got {n}")
    order = draw_box(key, (n,), None, torch.int64, device, same_bits)
    return torch.argsort(order, stable=True)


def _check_integer_dtype(dtype: torch.dtype, low: int, high: int) -> None:
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise UsageError(f"the dtype of integers must be an integer one, got {dtype}")
    range_of = torch.iinfo(dtype)
    if low < range_of.min or high - 1 > range_of.max:
        raise UsageError(
            f"{dtype} holds {range_of.min} to {range_of.max}, not all of {low} to {high - 1}"
        )
