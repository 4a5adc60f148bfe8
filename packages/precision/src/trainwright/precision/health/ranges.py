"""Shares of a tensor that a number format loses, measured every so many steps."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from trainwright.collectives import Communicator
from trainwright.precision.errors import PrecisionError
from trainwright.precision.formats import NumberFormat

from .counting import (
    NamedTensors,
    Sample,
    Share,
    Tally,
    add_up,
    as_named,
    cut,
    flat,
    positions,
    table,
    tally,
)

# Shapes: K kinds of loss (to zero, too large, not finite).


@attrs.frozen
class TensorRange:
    """How much of one tensor a format cannot hold.

    Args:
        name: the tensor's.
        num_elements: elements on all ranks; a replicated tensor counts once a rank.
        num_looked_at: of these, how many were looked at.
        underflow: share of elements that are not zero and become zero.
        overflow: share of finite elements that round beyond the largest number.
        non_finite: share that is infinite or NaN before any rounding.
    """

    name: str
    num_elements: int
    num_looked_at: int
    underflow: Share
    overflow: Share
    non_finite: Share


@attrs.frozen
class RangeReport:
    """The under- and overflow of tensors in one format; its str is a table.

    Args:
        format: name of the format.
        tensors: one entry a tensor, in the order of their names as given.
    """

    format: str
    tensors: tuple[TensorRange, ...]

    def __getitem__(self, name: str) -> TensorRange:
        """Return the entry of the tensor called ``name``."""
        for entry in self.tensors:
            if entry.name == name:
                return entry
        raise KeyError(name)

    def __str__(self) -> str:
        """Return a table with a line a tensor."""
        rows = [
            (t.name, str(t.num_elements), str(t.underflow), str(t.overflow), str(t.non_finite))
            for t in self.tensors
        ]
        return table((self.format, "elements", "underflow", "overflow", "not finite"), rows)


def range_report(
    tensors: NamedTensors,
    format: NumberFormat,
    *,
    scale: float | Mapping[str, float] = 1.0,
    sample: Sample | None = None,
    communicator: Communicator | None = None,
) -> RangeReport:
    """Count what becomes zero or too large where ``tensor * scale`` is rounded to ``format``.

    Rounding is to nearest even. Give gradients as they are after ``unscale_`` and the loss scale,
    such as ``{name: p.grad for name, p in model.named_parameters()}`` and ``scaler.get_scale()``,
    to learn what a backward pass in that format lost. It reads each tensor once, in pieces, in its
    own memory, and the host waits for the device once.

    Args:
        tensors: name to floating-point tensor; None where this rank has nothing of that name.
        format: a signed one.
        scale: what tensors are multiplied by before they are rounded; for all or by name.
        sample: which elements to look at; None: all of them.
        communicator: the ranks whose parts are taken together; all give the same names in the same
            order.

    Returns:
        The report, the same on all ranks of the communicator.

    Raises:
        PrecisionError: the format is unsigned, a scale is missing or not positive and finite, a
            tensor is not floating-point, or the ranks' names differ.

    Communicates:
        One all-reduce of 24 + 136 bytes a tensor.
    """
    if not format.signed:
        raise PrecisionError(f"a range is reported in signed formats, got {format.name}")
    named = as_named(tensors)
    scales = {name: _scale_of(name, scale) for name, _ in named}
    own = [
        _tally_of(name, tensor, format, scales[name], sample, communicator)
        for name, tensor in named
    ]
    summed = add_up([name for name, _ in named], own, 3, communicator)
    return RangeReport(
        format.name,
        tuple(
            TensorRange(name, total.num_elements, total.num_looked_at, *total.shares)
            for (name, _), total in zip(named, summed, strict=True)
        ),
    )


def _scale_of(name: str, scale: float | Mapping[str, float]) -> float:
    if isinstance(scale, Mapping) and name not in scale:
        raise PrecisionError(f"scale must hold a number for {name}, it has {sorted(scale)}")
    value = scale[name] if isinstance(scale, Mapping) else scale
    if not 0.0 < value < float("inf"):
        raise PrecisionError(f"the scale of {name} must be positive and finite, got {value}")
    return value


def _tally_of(
    name: str,
    tensor: torch.Tensor | None,
    format: NumberFormat,
    scale: float,
    sample: Sample | None,
    communicator: Communicator | None,
) -> Tally | None:
    if tensor is None or tensor.numel() == 0:
        return None
    values = flat(tensor)
    places = positions(values, sample, communicator)
    looked_at = values if places is None else values[places]
    lost_K = torch.zeros(3, dtype=torch.int64, device=values.device)
    for piece in cut(looked_at):
        lost_K += _count_lost(piece, format, scale)
    return tally(values.numel(), looked_at.numel(), lost_K)


def _count_lost(values: torch.Tensor, format: NumberFormat, scale: float) -> torch.Tensor:
    wide = values if values.dtype == torch.float64 else values.float()
    smallest = format.min_subnormal or format.min_normal
    # Halfway to the next larger number, if there were one; ties go to the even code.
    too_large = format.max + 2.0**format.emax * format.eps / 2
    finite = wide.isfinite()
    size = (wide * scale).abs_()
    beyond = size >= too_large if format.max_code % 2 else size > too_large
    counts = [
        torch.count_nonzero((size <= smallest / 2).logical_and_(wide)),
        torch.count_nonzero(beyond.logical_and_(finite)),
        wide.numel() - torch.count_nonzero(finite),
    ]
    return torch.stack(counts)
