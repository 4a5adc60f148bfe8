"""The elements of a tensor without its gaps and repetitions, and the tensor from them again."""

from __future__ import annotations

import math

import attrs
import torch

_LARGEST_WHOLE = 16


@attrs.frozen
class Strided:
    """How a tensor lies in memory, so that one with the same strides can be made.

    Kernels choose their order of summation by strides, so a tensor that comes back with others
    could give other last bits.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Strided:
        """Return the layout of a strided tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    @property
    def shape_of_elements(self) -> tuple[int, ...]:
        """The shape without repetitions: dims of stride 0 hold one element."""
        return tuple(
            1 if stride == 0 and size > 1 else size
            for size, stride in zip(self.shape, self.stride, strict=True)
        )

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of ``tensor``, which lies so, that has each element once."""
        for dim, size in enumerate(self.shape_of_elements):
            if size != self.shape[dim]:
                tensor = tensor.narrow(dim, 0, 1)
        return tensor

    def empty(self) -> torch.Tensor:
        """Return an uninitialised tensor for `take`'s elements, which `spread` makes whole."""
        return torch.empty_strided(
            self.shape_of_elements, self.stride, dtype=self.dtype, device=self.device
        )

    def spread(self, elements: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor as a view of ``elements``."""
        return elements.expand(self.shape)


def has_gaps(tensor: torch.Tensor) -> bool:
    """Whether a tensor that `is_plain` leaves out elements that lie between its own."""
    count, span, _ = _extent(tensor)
    return span > count


def is_part_of_whole(tensor: torch.Tensor, *, gaps: bool) -> bool:
    """Whether a tensor is best held with all of its storage, which others may share.

    That is one that covers its storage in another shape, and where ``gaps`` are allowed one that
    leaves out elements in between, as queries do among keys; but no small part, such as a few
    columns of a workspace.
    """
    if not tensor.numel() or not is_plain(tensor):
        return False
    count, span, length = _extent(tensor)
    if length is None or (tensor.dim() == 1 and count == length):
        return False
    return count == length or (gaps and span > count and length <= _LARGEST_WHOLE * count)


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements of a tensor's storage as a row."""
    length = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((length,), (1,), 0)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one whose elements can be copied out and put back.

    Not so are sparse, nested, quantised and meta tensors, subclasses, and those whose elements
    overlap other than by stride 0.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return False
    if tensor.is_quantized or tensor.device.type == "meta" or tensor.is_conj() or tensor.is_neg():
        return False
    reach = 1
    dims = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    for stride, size in dims:
        if size > 1 and stride != 0:
            if stride < reach:
                return False
            reach = stride * (size - 1) + reach
    return True


def _extent(tensor: torch.Tensor) -> tuple[int, int, int | None]:
    """Count the elements, the places from the first to the last, and those of the storage."""
    dims = [(n, stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    count = math.prod(size for size, _ in dims)
    span = 1 + sum((size - 1) * stride for size, stride in dims) if count else 0
    length, rest = divmod(tensor.untyped_storage().nbytes(), tensor.element_size())
    return count, span, None if rest else length
