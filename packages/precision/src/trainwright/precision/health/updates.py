"""Updates that rounding to 16 bits swallows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import attrs
import torch

from trainwright.collectives import Communicator
from trainwright.precision.errors import PrecisionError
from trainwright.precision.gradients import local_values

from .counting import (
    PIECE,
    Sample,
    Share,
    Tally,
    add_up,
    flat,
    positions,
    table,
    tally,
)


@attrs.frozen
class TensorUpdates:
    """How much of one weight's update was lost.

    Args:
        name: the weight's.
        num_elements: elements on all ranks; a replicated weight counts once a rank.
        num_looked_at: of these, how many were looked at.
        lost: share of the elements with an update whose 16-bit number stayed as it was.
    """

    name: str
    num_elements: int
    num_looked_at: int
    lost: Share


@attrs.frozen
class UpdateReport:
    """The updates of one step that rounding swallowed; its str is a table.

    Args:
        dtype: the dtype to which weights are rounded.
        tensors: one entry a weight.
    """

    dtype: torch.dtype
    tensors: tuple[TensorUpdates, ...]

    def __getitem__(self, name: str) -> TensorUpdates:
        """Return the entry of the weight called ``name``."""
        for entry in self.tensors:
            if entry.name == name:
                return entry
        raise KeyError(name)

    def __str__(self) -> str:
        """Return a table with a line a weight."""
        rows = [
            (t.name, str(t.num_elements), f"{t.lost.whole:.0f}", str(t.lost)) for t in self.tensors
        ]
        return table((str(self.dtype), "elements", "updated", "lost"), rows)


@attrs.frozen
class _Before:
    name: str
    weight: torch.Tensor
    places: torch.Tensor | None
    values: torch.Tensor


@final
class UpdateWatch:
    """Compares weights before and after an optimizer's step.

    Of a weight wider than ``rounds_to``, such as a master, an update is a change, and it is lost
    where both numbers round to the same one: so much a model without masters would have lost in
    this step. Of a weight in ``rounds_to``, an element with a gradient other than zero is to be
    updated, and the update is lost where the element stayed as it was; with masters beneath, it is
    kept there and shows later. Weights without gradient are then taken as not updated.

    Call `start`, step the optimizer, and call `finish` before gradients are zeroed; do not finish
    after a skipped step, which changes nothing.

    Args:
        parameters: (name, weight) pairs, such as ``model.named_parameters()`` or
            ``optimizer.state_dict()["masters"].items()`` of `MasterWeights`.
        rounds_to: torch.bfloat16 or torch.float16.

    Raises:
        PrecisionError: another dtype, or a 16-bit weight of the other one.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, torch.Tensor]], rounds_to: torch.dtype
    ) -> None:
        if rounds_to not in (torch.bfloat16, torch.float16):
            raise PrecisionError(f"rounds_to must be bfloat16 or float16, got {rounds_to}")
        self._parameters = list(parameters)
        self._dtype = rounds_to
        self._before: list[_Before] | None = None
        for name, weight in self._parameters:
            wide = weight.dtype in (torch.float32, torch.float64)
            if not wide and weight.dtype != rounds_to:
                raise PrecisionError(
                    f"{name} must be float32, float64 or {rounds_to}, got {weight.dtype}"
                )

    def start(
        self, sample: Sample | None = None, *, communicator: Communicator | None = None
    ) -> None:
        """Remember the weights, all elements or those of a sample; forget what was remembered.

        Args:
            sample: which elements; None copies all weights.
            communicator: that of `finish`, whose ranks then draw apart.
        """
        self._before = []
        for name, weight in self._parameters:
            values = flat(local_values(name, weight.detach()))
            places = positions(values, sample, communicator)
            kept = values.clone() if places is None else _looked_at(values, places)
            self._before.append(_Before(name, weight, places, kept))

    def finish(self, communicator: Communicator | None = None) -> UpdateReport:
        """Compare the weights with those remembered, and forget these.

        Args:
            communicator: the ranks whose parts are taken together; all watch the same names.

        Returns:
            The report, the same on all ranks of the communicator.

        Raises:
            PrecisionError: not started, or the ranks' names differ.

        Communicates:
            One all-reduce of 24 + 56 bytes a weight.
        """
        if self._before is None:
            raise PrecisionError("finish() without start(): nothing to compare the weights with")
        before, self._before = self._before, None
        tallies = [self._compare(entry) for entry in before]
        totals = add_up([entry.name for entry in before], tallies, 1, communicator)
        return UpdateReport(
            self._dtype,
            tuple(
                TensorUpdates(entry.name, total.num_elements, total.num_looked_at, *total.shares)
                for entry, total in zip(before, totals, strict=True)
            ),
        )

    def _compare(self, before: _Before) -> Tally | None:
        weight = local_values(before.name, before.weight.detach())
        if weight.numel() == 0:
            return None
        now = _looked_at(flat(weight), before.places)
        moved = self._gradient(before, weight) if weight.dtype == self._dtype else None
        lost = torch.zeros(1, dtype=torch.int64, device=weight.device)
        updated = torch.zeros_like(lost)
        for start in range(0, now.numel(), PIECE):
            here = slice(start, start + PIECE)
            old, new = before.values[here], now[here]
            wanted = old != new if moved is None else moved[here] != 0
            stayed = old.to(self._dtype) == new.to(self._dtype)
            updated += torch.count_nonzero(wanted)
            lost += torch.count_nonzero(wanted.logical_and_(stayed))
        return tally(weight.numel(), now.numel(), lost, updated)

    def _gradient(self, before: _Before, weight: torch.Tensor) -> torch.Tensor:
        gradient: torch.Tensor | None = before.weight.grad
        if gradient is None:
            return before.values.new_zeros(()).expand(before.values.shape)
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        own = local_values(f"the gradient of {before.name}", dense.detach())
        return _looked_at(flat(own, like=weight), before.places)


def _looked_at(values: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
    return values if places is None else values[places]
