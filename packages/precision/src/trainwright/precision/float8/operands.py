"""Matrices as operands, and what recipes share."""

# Shapes: R rows, C columns of a matrix; N rows of an operand, K the dim that is summed over.

from __future__ import annotations

import attrs
import torch

from trainwright.precision.errors import PrecisionError
from trainwright.precision.formats import (
    E4M3,
    E5M2,
    BlockQuantized,
    NumberFormat,
    encode_scaled,
)

from .roles import Along, Role


def as_operand(matrix_RC: torch.Tensor, along: Along) -> torch.Tensor:
    """Return a view whose last dim is the one that is summed over."""
    return matrix_RC if along is Along.COLUMNS else matrix_RC.t()


def turned(operand: BlockQuantized) -> BlockQuantized:
    """Return the transposed matrix, with the same codes and scales."""
    height, width = operand.block
    return attrs.evolve(
        operand, codes=operand.codes.t(), scales=operand.scales.t(), block=(width, height)
    )


def encode_rows(
    matrix_RC: torch.Tensor, along: Along, multiplier: torch.Tensor, format: NumberFormat
) -> BlockQuantized:
    """Return an operand with one scale, or one for each row.

    Args:
        matrix_RC: what is encoded.
        along: the dim that is summed over.
        multiplier: 0-d, or [N, 1].
        format: of the codes.
    """
    values_NK = as_operand(matrix_RC, along)
    rows, cols = (max(1, size) for size in values_NK.shape)
    block = (rows, cols) if multiplier.ndim == 0 else (1, cols)
    scales = multiplier.reciprocal().reshape(-1, 1)
    if values_NK.numel() == 0:
        # An empty matrix has no block.
        codes_NK = torch.empty(values_NK.shape, dtype=torch.uint8, device=values_NK.device)
        none = scales[: values_NK.shape[0], : values_NK.shape[1]]
        return BlockQuantized(codes_NK, none, format, block)
    codes_NK = encode_scaled(values_NK, multiplier, format)
    return BlockQuantized(codes_NK, scales, format, block)


def check_format(_: object, attribute: attrs.Attribute[NumberFormat], value: NumberFormat) -> None:
    """Refuse what has no product: a validator of attrs."""
    if value not in (E4M3, E5M2):
        raise PrecisionError(
            f"{attribute.name} must be E4M3 or E5M2, got {getattr(value, 'name', value)!r}"
        )


def format_name(format: NumberFormat) -> str:
    """Return what a recipe prints of a format."""
    return format.name


@attrs.frozen
class Formats:
    """The formats of a recipe's matrices."""

    forward: NumberFormat = attrs.field(
        default=E4M3, validator=check_format, repr=format_name, kw_only=True
    )
    gradient: NumberFormat = attrs.field(
        default=E5M2, validator=check_format, repr=format_name, kw_only=True
    )

    def format_of(self, role: Role) -> NumberFormat:
        """Return the format of the matrix in this role."""
        return self.gradient if role is Role.GRADIENT else self.forward


@attrs.frozen
class Memoryless(Formats):
    """What recipes share that look at the matrix at hand alone."""

    @property
    def history_length(self) -> int:
        """No memory is wanted."""
        return 0
