"""The three matrices of a linear layer, and which ranks hold parts of them."""

# Shapes: M tokens, I in_features, O out_features.

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Protocol

import attrs
import torch

from trainwright.collectives import Communicator, ReduceOp
from trainwright.precision.errors import PrecisionError


class Role(enum.Enum):
    """Which matrix of a linear layer a tensor is."""

    INPUT = "input"
    WEIGHT = "weight"
    GRADIENT = "gradient"


class Along(enum.Enum):
    """The dim over which a product sums: an operand's blocks lie along it."""

    COLUMNS = "columns"
    ROWS = "rows"


class Ranges(Protocol):
    """Which indices of a dim each rank has, where parts are not simply equal."""

    @property
    def size(self) -> int:
        """Of the whole dim."""
        ...

    @property
    def ranges(self) -> Sequence[Sequence[tuple[int, int]]]:
        """By rank, the ranges (start, stop) in the order in which it has them."""
        ...


@attrs.frozen(eq=False)
class Cut:
    """The ranks over which the rows and the columns of one logical matrix are cut.

    Args:
        rows: ranks that have other rows.
        columns: ranks that have other columns.
        row_ranges: which of them; None: equal parts.
        column_ranges: as ``row_ranges``.
        row_runs: how many runs of neighbouring rows a rank has.
    """

    rows: tuple[Communicator, ...] = ()
    columns: tuple[Communicator, ...] = ()
    row_ranges: Ranges | None = None
    column_ranges: Ranges | None = None
    row_runs: int = 1

    def of(self, along: Along) -> tuple[Communicator, ...]:
        """Return the ranks over which this dim is cut."""
        return self.columns if along is Along.COLUMNS else self.rows

    def ranges_of(self, along: Along) -> Ranges | None:
        """Return which indices of this dim each rank has; None: equal parts."""
        return self.column_ranges if along is Along.COLUMNS else self.row_ranges


def _as_ranks(given: Communicator | Sequence[Communicator] | None) -> tuple[Communicator, ...]:
    if given is None:
        return ()
    found = tuple(given) if isinstance(given, list | tuple) else (given,)
    for comm in found:
        if not isinstance(comm, Communicator):
            raise PrecisionError(
                f"a dim is cut over a communicator, several of them, or None, got {comm!r}"
            )
    return tuple(comm for comm in found if isinstance(comm, Communicator) and comm.size > 1)


def _check_runs(_: object, attribute: attrs.Attribute[int], value: int) -> None:
    if type(value) is not int or value < 1:
        raise PrecisionError(f"{attribute.name} is a number of runs, at least 1, got {value!r}")


@attrs.frozen(eq=False)
class Scope:
    """Over which ranks the three dims of a linear layer are cut; whatever is not named is whole.

    A largest magnitude belongs to a logical tensor, not to the part of it that a rank holds: it is
    the maximum over these ranks. Each dim takes one communicator, several, or None.

    Args:
        tokens: those that hold other tokens of the same sequences, equally many: cp, and sp where
            the layer is given a part. Not dp: another microbatch is another tensor.
        in_features: tp of a layer that is cut by its inputs.
        out_features: tp of a layer that is cut by its outputs.
        in_ranges: which inputs each of those ranks has; None: equal parts, or blocks do not matter.
        out_ranges: as ``in_ranges``.
        token_dim: the dim of an input that is cut over ``tokens``: -2 of [B, S, I], 0 of [S, B, I].
            It matters where blocks lie along tokens.
        token_runs: how many runs of neighbouring tokens a rank has of a sequence, equally long: 2
            where context parallelism gives each an early and a late one.
    """

    tokens: tuple[Communicator, ...] = attrs.field(default=(), converter=_as_ranks)
    in_features: tuple[Communicator, ...] = attrs.field(default=(), converter=_as_ranks)
    out_features: tuple[Communicator, ...] = attrs.field(default=(), converter=_as_ranks)
    in_ranges: Ranges | None = None
    out_ranges: Ranges | None = None
    token_dim: int = -2
    token_runs: int = attrs.field(default=1, validator=_check_runs)

    @property
    def num_ranks(self) -> int:
        """Ranks that hold parts of one logical layer and its tokens."""
        return num_parts(self.tokens + self.in_features + self.out_features)

    def run_of(self, shape: torch.Size) -> int:
        """Return how many neighbouring tokens of the whole a rank has, given an input's shape."""
        if not -len(shape) <= self.token_dim < len(shape):
            return 1
        run = math.prod(shape[self.token_dim : -1])
        return run // self.token_runs if run % self.token_runs == 0 else 1

    def cut(self, role: Role) -> Cut:
        """Return how the matrix in this role is cut."""
        if role is Role.INPUT:
            return Cut(self.tokens, self.in_features, None, self.in_ranges, self.token_runs)
        if role is Role.WEIGHT:
            return Cut(self.out_features, self.in_features, self.out_ranges, self.in_ranges)
        return Cut(self.tokens, self.out_features, None, self.out_ranges, self.token_runs)


def num_parts(comms: tuple[Communicator, ...]) -> int:
    """Return into how many parts a dim is cut over these ranks."""
    return math.prod(comm.size for comm in comms)


def largest_over(amax: torch.Tensor, comms: tuple[Communicator, ...]) -> torch.Tensor:
    """Return the maximum over the ranks, infinite where any of them is not finite.

    Communicates:
        One all-reduce of ``amax`` over each of the communicators; none without.
    """
    if not comms:
        return amax
    # NaN as infinity, which every communicator's maximum keeps.
    whole = amax.nan_to_num(nan=torch.inf, posinf=torch.inf).contiguous()
    for comm in comms:
        comm.all_reduce(whole, ReduceOp.MAX).wait()
    return whole
