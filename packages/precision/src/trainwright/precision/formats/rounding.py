"""What becomes of the digits that a format has not."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import attrs
import torch

from trainwright.collectives import Box
from trainwright.collectives.random import Key, words
from trainwright.precision.errors import PrecisionError

_DRAWN_BITS = 53
_WORD_BITS = 32
# Ends the name under which the lower bits are drawn.
_LOW = "/low"


def _to_shape(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(sizes)


class Rounding(Protocol):
    """Drops low bits of significands.

    Laws: the result is one of the two integers next to ``significand / 2**shift``, or that itself
    where it is an integer; signs are not seen, so that rounding is symmetric.
    """

    def __call__(self, significand: torch.Tensor, shift: torch.Tensor, first: int) -> torch.Tensor:
        """Return the significands without their lowest ``shift`` bits.

        Args:
            significand: non-negative int32 below 2**24 or int64 below 2**53, flat.
            shift: how many bits go, of each; may be more than there are.
            first: the position, in the tensor that is being encoded, of the first of them.

        Returns:
            New integers of the same or a wider dtype.
        """
        ...


def nearest_even(significand: torch.Tensor, shift: torch.Tensor, first: int) -> torch.Tensor:
    """Round to the nearer of two numbers, to the even one from the middle."""
    shift = _within_width(significand, shift)
    dropped = (1 << shift).sub_(1)
    # One below the half, and one more where the last kept bit is set; nothing where nothing goes.
    odd = (significand >> shift).bitwise_and_(1).bitwise_and_(dropped)
    return dropped.bitwise_right_shift_(1).add_(odd).add_(significand).bitwise_right_shift_(shift)


def toward_zero(significand: torch.Tensor, shift: torch.Tensor, first: int) -> torch.Tensor:
    """Cut the digits off."""
    return significand >> _within_width(significand, shift)


def by_draws(significand: torch.Tensor, shift: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Round up if a draw is below the dropped digits, as a part of the distance of the two numbers.

    Args:
        significand: as in `Rounding`.
        shift: as there.
        draws: int64 integers 0 to 2**53 - 1, of which the high ``shift`` bits count. If all are
            equally likely, the expected value is that of the significand: exactly so while at most
            53 bits go, else but for less than 2**-53 of the distance of the two numbers.
    """
    beyond = (shift.long() - _DRAWN_BITS).clamp_(0, 62)
    kept = significand.long() >> beyond
    shift = shift.long().clamp_max(_DRAWN_BITS)
    return (draws >> (_DRAWN_BITS - shift)).add_(kept).bitwise_right_shift_(shift)


@attrs.frozen
class Stochastic:
    """Rounds up with the probability that keeps the expected value, by numbers of the place.

    An element's draw depends on the key and on its position in the global tensor, on nothing else:
    replicas round alike, and a shard rounds as that part of the whole. Use another name or step for
    every rounding that must be independent.

    Args:
        key: seed, name such as that of the parameter, and step.
        shape: the global tensor's, if only a box of it is rounded here.
        box: which part of it is; None: all of it.
        start: position, in the box in row-major order, of the first element here.

    Raises:
        PrecisionError: a box without the global shape, or not within it; a negative start; or, when
            rounding, more elements than the box has from ``start``.
    """

    key: Key
    shape: tuple[int, ...] | None = attrs.field(
        default=None, converter=attrs.converters.optional(_to_shape)
    )
    box: Box | None = None
    start: int = 0

    def __attrs_post_init__(self) -> None:
        if self.start < 0:
            raise PrecisionError(f"start must not be negative, got {self.start}")
        if self.box is None:
            return
        if self.shape is None:
            raise PrecisionError(f"{self.box} needs the shape of the global tensor")
        if len(self.shape) != len(self.box.stop) or any(
            stop > size for stop, size in zip(self.box.stop, self.shape, strict=True)
        ):
            raise PrecisionError(f"{self.box} is not within the global shape {self.shape}")

    def __call__(self, significand: torch.Tensor, shift: torch.Tensor, first: int) -> torch.Tensor:
        """Return what `by_draws` makes of the draws of these places."""
        stop = first + significand.numel()
        draws = self.words(first, stop, significand.device) << (_DRAWN_BITS - _WORD_BITS)
        # Of the draws, as many high bits count as go: only few numbers, or wide ones, need more.
        on_cpu = significand.device.type == "cpu"
        if stop > first and not (on_cpu and int(shift.max()) <= _WORD_BITS):
            low = attrs.evolve(self, key=attrs.evolve(self.key, name=self.key.name + _LOW))
            more = low.words(first, stop, significand.device)
            draws |= more >> (2 * _WORD_BITS - _DRAWN_BITS)
        return by_draws(significand, shift, draws)

    def words(self, first: int, stop: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the high 32 of the 53 bits that are drawn for a range of the elements here.

        Args:
            first: of the range, counted from ``start``.
            stop: one past its last.
            device: where to compute and return them.

        Returns:
            Flat int64.
        """
        first, stop = self.start + first, self.start + stop
        part = Box.full(self.shape) if self.box is None and self.shape is not None else self.box
        if part is None:
            part = Box((0,), (stop,))
        if stop > part.numel:
            raise PrecisionError(
                f"elements {first} to {stop - 1} are rounded, but {part} has only {part.numel}"
            )
        shape = self.shape or part.stop
        if part.shape[1:] == shape[1:]:
            row = math.prod(shape[1:])
            offset = part.start[0] * row if part.start else 0
            flat = Box((offset + first,), (offset + stop,))
            return words(self.key, flat.stop, box=flat, device=device)
        runs = [
            words(self.key, shape, box=run, device=device).view(-1) for run in part.cut(first, stop)
        ]
        if len(runs) == 1:
            return runs[0]
        return torch.cat([torch.empty(0, dtype=torch.int64, device=device), *runs])


def _within_width(significand: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    # All that goes beyond the significand's bits goes alike; a longer shift has no meaning.
    return shift.clamp_max(torch.iinfo(significand.dtype).bits - 2)
