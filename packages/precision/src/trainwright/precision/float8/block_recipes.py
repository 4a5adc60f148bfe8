"""Recipes with one scale a block. Values, compared and printed."""

# Shapes: R rows, C columns of a matrix.

from __future__ import annotations

from collections.abc import Collection

import attrs
import torch

from trainwright.precision.errors import PrecisionError
from trainwright.precision.formats import (
    E4M3,
    BlockQuantized,
    ExponentRule,
    NumberFormat,
    ceil_exponent,
    quantize_blockwise,
    quantize_mx,
)

from .operands import Memoryless, as_operand, check_format, format_name
from .protocol import Binding, Multipliers
from .roles import Along, Ranges, Role, num_parts

_BLOCK = 128
_MX_BLOCK = 32


@attrs.frozen
class Blockwise(Memoryless):
    """One scale for each 1x128 of inputs and gradients, and for each 128x128 of weights.

    Blocks of inputs and gradients lie along the dim that a product sums over. Where a dim is cut
    over ranks, its parts are multiples of 128, so that blocks are those of the whole matrix; the
    last block of a whole dim may be smaller.

    Args:
        power_of_two: whether scales are powers of two, so that scaling does not round.
        forward: format of inputs and weights.
        gradient: format of the gradients of outputs.

    Communicates:
        Nothing.

    Source:
        DeepSeek-V3 technical report, section 3.3 (2024).
    """

    power_of_two: bool = False
    gradient: NumberFormat = attrs.field(
        default=E4M3, validator=check_format, repr=format_name, kw_only=True
    )

    @property
    def turns(self) -> bool:
        """Codes along one dim do not serve along the other."""
        return False

    def check(self, binding: Binding, shape: torch.Size, wanted: Collection[Along]) -> None:
        """Refuse parts that end within a block."""
        is_square = binding.role is Role.WEIGHT
        _check_parts(binding, shape, tuple(Along) if is_square else wanted, _BLOCK)

    def measure(
        self, matrix_RC: torch.Tensor, binding: Binding, wanted: Collection[Along], records: bool
    ) -> Multipliers:
        """Return nothing: blocks are measured where they are encoded."""
        self.check(binding, matrix_RC.shape, wanted)
        return {}

    def quantize(
        self, matrix_RC: torch.Tensor, role: Role, along: Along, multipliers: Multipliers
    ) -> BlockQuantized:
        """Return the operand."""
        block = (_BLOCK, _BLOCK) if role is Role.WEIGHT else (1, _BLOCK)
        return quantize_blockwise(
            as_operand(matrix_RC, along),
            block,
            self.format_of(role),
            power_of_two=self.power_of_two,
        )


def _name_of(rule: ExponentRule) -> str:
    return getattr(rule, "__name__", repr(rule))


@attrs.frozen
class Mx(Memoryless):
    """One power of two for each 32 elements along the dim that a product sums over.

    Where that dim is cut over ranks, its parts are multiples of 32, so that blocks are those of the
    whole matrix; the last block of a whole dim may be smaller.

    Args:
        rule: `ceil_exponent`, with which nothing saturates, or `floor_exponent`, as OCP has it.
        forward: format of inputs and weights.
        gradient: format of the gradients of outputs.

    Communicates:
        Nothing.

    Source:
        OCP microscaling formats 1.0 (2023).
    """

    rule: ExponentRule = attrs.field(default=ceil_exponent, repr=_name_of)
    gradient: NumberFormat = attrs.field(
        default=E4M3, validator=check_format, repr=format_name, kw_only=True
    )

    @property
    def turns(self) -> bool:
        """Codes along one dim do not serve along the other."""
        return False

    def check(self, binding: Binding, shape: torch.Size, wanted: Collection[Along]) -> None:
        """Refuse parts that end within a block."""
        _check_parts(binding, shape, wanted, _MX_BLOCK)

    def measure(
        self, matrix_RC: torch.Tensor, binding: Binding, wanted: Collection[Along], records: bool
    ) -> Multipliers:
        """Return nothing: blocks are measured where they are encoded."""
        self.check(binding, matrix_RC.shape, wanted)
        return {}

    def quantize(
        self, matrix_RC: torch.Tensor, role: Role, along: Along, multipliers: Multipliers
    ) -> BlockQuantized:
        """Return the operand."""
        return quantize_mx(as_operand(matrix_RC, along), self.format_of(role), self.rule)


def _check_parts(
    binding: Binding, shape: torch.Size, wanted: Collection[Along], block: int
) -> None:
    names = _DIMS[binding.role]
    for along in wanted:
        dim = 1 if along is Along.COLUMNS else 0
        parts, size = num_parts(binding.cut.of(along)), shape[dim]
        ranges = binding.cut.ranges_of(along)
        if parts == 1 or (ranges is None and size % block == 0):
            continue
        what = f"parts of {size}"
        if ranges is not None:
            edge = _edge_within_a_block(ranges, block)
            if edge is None:
                continue
            what, size = f"parts that meet at {edge}", ranges.size // parts
        step = block * parts * (binding.cut.row_runs if along is Along.ROWS else 1)
        below = size // block * step
        fitting = f"{below} or {below + step}" if below else f"{step}"
        raise PrecisionError(
            f"layer {binding.name}: its {names[dim]} are cut over {parts} ranks into {what}, "
            f"within a block of {block} of the {binding.role.value}, so that its scale "
            f"would be another than on one rank; {names[dim]} = {fitting} fit, "
            f"or fewer ranks, or a recipe with one scale a matrix"
        )


def _edge_within_a_block(ranges: Ranges, block: int) -> int | None:
    """Return where a rank's blocks would not be those of the whole, the same on every rank."""
    for of_rank in ranges.ranges:
        for number, (start, stop) in enumerate(of_rank):
            # The last block of the whole may be smaller, but then nothing may come behind it.
            ends = stop == ranges.size and number == len(of_rank) - 1
            if start % block or (stop % block and not ends):
                return start if start % block else stop
    return None


_DIMS = {
    Role.INPUT: ("tokens", "in_features"),
    Role.WEIGHT: ("out_features", "in_features"),
    Role.GRADIENT: ("tokens", "out_features"),
}
