"""Recipes with one scale a matrix or a row. Values, compared and printed."""

# Shapes: R rows, C columns of a matrix.

from __future__ import annotations

from collections.abc import Collection

import attrs
import torch

from trainwright.precision.errors import PrecisionError
from trainwright.precision.formats import BlockQuantized, amax, scale_from_amax

from .operands import Formats, Memoryless, as_operand, encode_rows
from .protocol import Binding, Multipliers
from .roles import Along, Role, largest_over


def _check_history(_: object, attribute: attrs.Attribute[int], value: int) -> None:
    if type(value) is not int or not 1 <= value <= 1 << 16:
        raise PrecisionError(f"history is a number of steps, 1 to 65536, got {value!r}")


def _check_margin(_: object, attribute: attrs.Attribute[int], value: int) -> None:
    if type(value) is not int or not 0 <= value <= 64:
        raise PrecisionError(f"margin must be 0 to 64 powers of two, got {value!r}")


@attrs.frozen
class Current(Memoryless):
    """One scale a matrix, from its own largest magnitude.

    Args:
        power_of_two: whether scales are powers of two, so that scaling does not round.
        forward: format of inputs and weights.
        gradient: format of the gradients of outputs.

    Communicates:
        One all-reduce of 4 bytes for each communicator that the scope names for the matrix.
    """

    power_of_two: bool = False

    @property
    def turns(self) -> bool:
        """Codes serve along both dims."""
        return True

    def check(self, binding: Binding, shape: torch.Size, wanted: Collection[Along]) -> None:
        """Accept any part."""

    def measure(
        self, matrix_RC: torch.Tensor, binding: Binding, wanted: Collection[Along], records: bool
    ) -> Multipliers:
        """Return the same multiplier for both dims."""
        whole = largest_over(amax(matrix_RC), binding.cut.rows + binding.cut.columns)
        format = self.format_of(binding.role)
        scale = scale_from_amax(whole, format, power_of_two=self.power_of_two)
        return dict.fromkeys(wanted, scale)

    def quantize(
        self, matrix_RC: torch.Tensor, role: Role, along: Along, multipliers: Multipliers
    ) -> BlockQuantized:
        """Return the operand."""
        return encode_rows(matrix_RC, along, multipliers[along], self.format_of(role))


@attrs.frozen
class Delayed(Formats):
    """One scale a matrix, from the largest magnitude of the last steps.

    The scale is that of the maximum over the history, and is the same for every microbatch of a
    step. Where the history holds only zeros, as in the first step or for an expert that was not
    routed to, the matrix at hand says how large it is, as with `Current`. What is larger than the
    history becomes the largest number. What is met in training, not under ``no_grad`` or in
    ``eval``, enters the history when `Float8State.end_step` is called.

    Args:
        history: steps that are looked back on.
        margin: powers of two that are left free above.
        power_of_two: whether scales are powers of two, so that scaling does not round.
        forward: format of inputs and weights.
        gradient: format of the gradients of outputs.

    Communicates:
        Nothing but in `Float8State.end_step`, and where the history holds only zeros.

    Source:
        Micikevicius et al., FP8 formats for deep learning (2022).
    """

    history: int = attrs.field(default=16, validator=_check_history)
    margin: int = attrs.field(default=0, validator=_check_margin)
    power_of_two: bool = False

    @property
    def turns(self) -> bool:
        """Codes serve along both dims."""
        return True

    @property
    def history_length(self) -> int:
        """As given."""
        return self.history

    def check(self, binding: Binding, shape: torch.Size, wanted: Collection[Along]) -> None:
        """Accept any part."""

    def scale_from(self, amax: torch.Tensor, role: Role) -> torch.Tensor:
        """Return what a matrix with this largest magnitude is multiplied by."""
        format = self.format_of(role)
        return scale_from_amax(amax, format, self.margin, power_of_two=self.power_of_two)

    def measure(
        self, matrix_RC: torch.Tensor, binding: Binding, wanted: Collection[Along], records: bool
    ) -> Multipliers:
        """Return the remembered multiplier, or NaN where the matrix is not finite."""
        memory = binding.memory
        if memory is None:
            raise PrecisionError(f"{binding.name} has no memory; bind Delayed by a Float8State")
        own = amax(matrix_RC).float()
        if records:
            memory.record(own)
        if memory.is_blank:
            whole = largest_over(own, binding.cut.rows + binding.cut.columns)
            return dict.fromkeys(wanted, self.scale_from(whole, binding.role))
        # The cast to E4M3 would make the largest number of infinity: zero times it is NaN.
        return dict.fromkeys(wanted, memory.scale.to(own.device) + own * 0.0)

    def quantize(
        self, matrix_RC: torch.Tensor, role: Role, along: Along, multipliers: Multipliers
    ) -> BlockQuantized:
        """Return the operand."""
        return encode_rows(matrix_RC, along, multipliers[along], self.format_of(role))


@attrs.frozen
class PerRow(Memoryless):
    """One scale for each row of an operand: all that one element of the product sums over.

    A matrix is quantised anew for each product that reads it, along the dim that is summed over.

    Args:
        power_of_two: whether scales are powers of two, so that scaling does not round.
        forward: format of inputs and weights.
        gradient: format of the gradients of outputs.

    Communicates:
        One all-reduce of 4 bytes a row for each communicator over which the dim is cut.
    """

    power_of_two: bool = False

    @property
    def turns(self) -> bool:
        """Codes along one dim do not serve along the other."""
        return False

    def check(self, binding: Binding, shape: torch.Size, wanted: Collection[Along]) -> None:
        """Accept any part."""

    def measure(
        self, matrix_RC: torch.Tensor, binding: Binding, wanted: Collection[Along], records: bool
    ) -> Multipliers:
        """Return [rows of the operand, 1] for each dim wanted."""
        format = self.format_of(binding.role)
        found = {}
        for along in sorted(wanted, key=lambda dim: dim.value):
            own = amax(as_operand(matrix_RC, along), 1, keepdim=True)
            whole = largest_over(own, binding.cut.of(along))
            found[along] = scale_from_amax(whole, format, power_of_two=self.power_of_two)
        return found

    def quantize(
        self, matrix_RC: torch.Tensor, role: Role, along: Along, multipliers: Multipliers
    ) -> BlockQuantized:
        """Return the operand."""
        return encode_rows(matrix_RC, along, multipliers[along], self.format_of(role))
