"""What a codec offers: a tensor as fewer bytes and back, with a bound on what is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class Codec(Protocol):
    """A way to write a floating-point tensor as other tensors, without state and without order.

    Laws: the shapes and dtypes of what ``encode`` returns follow from the shape and dtype of the
    tensor alone, so that ranks with tensors alike need not agree on sizes; the same values give
    the same bits; each element of ``decode(encode(tensor))`` is within ``error_bound(tensor)`` of
    the tensor's; a value that is not finite is never decoded to one that is.
    """

    def encode(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return contiguous tensors that `decode` takes, on the device of ``tensor``.

        Args:
            tensor: Floating point, any shape and strides; only read.

        Raises:
            UsageError: The dtype is not one that the codec encodes.
        """
        ...

    def decode(
        self, parts: Sequence[torch.Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a new contiguous tensor of ``shape`` and ``dtype``.

        ``shape`` is that of the tensor encoded; ``dtype`` may be wider than its dtype, as where
        contributions are added up.
        """
        ...

    def error_bound(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return how far, at most, each element comes back from where it was, in float64.

        It holds for decoding to the tensor's own dtype or a wider one. Infinite where a value may
        be lost as a whole.
        """
        ...
