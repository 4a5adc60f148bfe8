"""What a law of communicators is tried on: a shape, a dtype, a memory layout, an operation."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

import attrs
import torch
from hypothesis import strategies as st

from trainwright.collectives.calls import describe_dtype
from trainwright.collectives.protocol import ReduceOp

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
OTHERS = (torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16)


class Layout(enum.Enum):
    """How the elements of a tensor lie in memory."""

    CONTIGUOUS = "contiguous"
    OFFSET = "in the middle of a larger buffer"
    TRANSPOSED = "last dim first"
    STRIDED = "every second element"


@attrs.frozen
class Case:
    """One thing to try a law on; the same value on every rank.

    ``shape`` is what one rank contributes, ``op`` is valid for ``dtype``; ``root`` counts from any
    number and is taken modulo the size.
    """

    shape: tuple[int, ...] = (3, 2)
    dtype: torch.dtype = torch.float32
    layout: Layout = Layout.CONTIGUOUS
    op: ReduceOp = ReduceOp.SUM
    root: int = 0

    def __str__(self) -> str:
        """Name the case in a test's report."""
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{self.op.value}-{describe_dtype(self.dtype)}-{shape}-{self.layout.name.lower()}"


def contribution(case: Case, rank: int, shape: Sequence[int] | None = None) -> torch.Tensor:
    """Return what ``rank`` contributes: elements all different as far as the dtype can tell.

    Values are small integers and fractions, so that sums over a few ranks are exact in float32.
    """
    shape = case.shape if shape is None else tuple(shape)
    numel = math.prod(shape)
    # Steps of a large prime scatter the values, so that no two ranks or neighbours look alike.
    numbers = (torch.arange(numel) + 1 + rank * max(numel, 1)) * 7919
    if case.op.is_logical:
        # Zeros, and fractions that are not zero.
        scale = 4 if case.dtype.is_floating_point and case.dtype.itemsize > 1 else 1
        return (numbers % 3 / scale).to(case.dtype).view(shape)
    if case.dtype is torch.bool:
        return (numbers % 3 == 0).view(shape)
    if case.op is ReduceOp.PRODUCT:
        return (numbers % 3 + 1).to(case.dtype).view(shape)
    if not case.dtype.is_floating_point and not case.dtype.is_complex:
        return (numbers % (61 if case.dtype.itemsize == 1 else 8191)).to(case.dtype).view(shape)
    span = 33 if case.dtype.itemsize == 1 else 509
    real = (numbers % span).to(torch.float64) / 4 - span // 8
    if case.dtype.is_complex:
        return torch.complex(real, -2 * real).to(case.dtype).view(shape)
    return real.to(case.dtype).view(shape)


def lay_out(
    tensor: torch.Tensor, layout: Layout, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of ``tensor`` in a layout, and the whole buffer they are part of."""
    tensor = tensor.to(device)
    numel = tensor.numel()
    if layout is Layout.OFFSET:
        buffer = torch.ones(numel + 7, device=device).to(tensor.dtype)
        view = buffer[3 : 3 + numel].view(tensor.shape)
    elif layout is Layout.TRANSPOSED and tensor.ndim > 1:
        buffer = torch.empty_like(tensor.movedim(-1, 0), memory_format=torch.contiguous_format)
        view = buffer.movedim(0, -1)
    elif layout is Layout.STRIDED:
        buffer = torch.ones(max(2 * numel, 1), device=device).to(tensor.dtype)
        view = buffer[: 2 * numel].view(*tensor.shape, 2).select(-1, 0)
    else:
        buffer = tensor.clone()
        view = buffer
    view.copy_(tensor)
    return view, buffer


def is_meaningful(op: ReduceOp, dtype: torch.dtype) -> bool:
    """Whether ranks can be asked for ``op`` of ``dtype``."""
    if op.is_logical:
        return True
    if op.is_bitwise:
        return dtype is torch.bool or dtype in INTEGERS
    if dtype is torch.bool:
        return op in (ReduceOp.MAX, ReduceOp.MIN)
    if dtype.is_complex:
        return op in (ReduceOp.SUM, ReduceOp.AVG)
    if dtype.is_floating_point:
        return dtype.itemsize > 1 or op in (ReduceOp.MAX, ReduceOp.MIN)
    return dtype in INTEGERS and op is not ReduceOp.AVG


def cases(max_dims: int = 3, max_size: int = 4) -> st.SearchStrategy[Case]:
    """Draw cases with an operation that has a meaning for their dtype."""
    return st.builds(
        Case,
        shape=st.lists(st.integers(0, max_size), max_size=max_dims).map(tuple),
        dtype=st.sampled_from((*FLOATS, *INTEGERS, torch.bool, torch.complex64)),
        layout=st.sampled_from(Layout),
        op=st.sampled_from(ReduceOp),
        root=st.integers(0, 7),
    ).filter(lambda case: is_meaningful(case.op, case.dtype))


def some_cases() -> list[Case]:
    """Return a fixed choice of cases that covers each dtype, operation and layout."""
    shapes = ((), (5,), (3, 2), (2, 0), (2, 3, 2))
    layouts = tuple(Layout)
    chosen: list[Case] = []
    dtypes = (*FLOATS, *INTEGERS, torch.bool, torch.complex64)
    arithmetic = [op for op in ReduceOp if not op.is_logical and not op.is_bitwise]
    pairs = [(dtype, op) for dtype in dtypes for op in arithmetic]
    # Of the others a few dtypes each: they do not depend on it much.
    others = [op for op in ReduceOp if op not in arithmetic]
    pairs += [(dtype, op) for op in others for dtype in dtypes[len(pairs) % 2 :: 2]]
    for dtype, op in pairs:
        if is_meaningful(op, dtype):
            number = len(chosen)
            shape = shapes[number % len(shapes)]
            chosen.append(Case(shape, dtype, layouts[number % len(layouts)], op, number))
    # Large enough for the algorithms that work by chunks.
    chosen.append(Case((150_001,), torch.float32, Layout.CONTIGUOUS, ReduceOp.SUM, 1))
    chosen.append(Case((300_002,), torch.bfloat16, Layout.STRIDED, ReduceOp.AVG, 2))
    return chosen
