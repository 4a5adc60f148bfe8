"""Which gradient lies in which flat buffer, at which place: plain data, before any memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import torch

from trainwright.collectives.buckets.parameters import Parameters, shown, trainable
from trainwright.collectives.calls import describe_dtype
from trainwright.collectives.errors import UsageError

DEFAULT_BUCKET_BYTES = 25 << 20
_FIRST_BYTES = 1 << 20


@attrs.frozen
class Slot:
    """The place of one gradient in a bucket.

    Args:
        name: The parameter's.
        shape: The parameter's.
        strides: Of the view of the bucket, in elements; dense, in the parameter's order of dims.
        offset: The element of the bucket that it begins at.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


@attrs.frozen
class FlatBucket:
    """Gradients that lie behind one another in one flat buffer and are reduced together.

    Args:
        dtype: Of all of them.
        device: Where all of them live.
        slots: In the order in which they are expected to become ready.
    """

    dtype: torch.dtype
    device: torch.device
    slots: tuple[Slot, ...]

    @property
    def numel(self) -> int:
        """The length of the buffer: the slots leave no gaps."""
        last = self.slots[-1]
        return last.offset + last.numel

    @property
    def num_bytes(self) -> int:
        """The bytes of the buffer."""
        return self.numel * self.dtype.itemsize


@attrs.frozen
class BucketPlan:
    """Buckets in the order in which all ranks reduce them.

    Args:
        buckets: Each parameter is in exactly one of them.
    """

    buckets: tuple[FlatBucket, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names, bucket after bucket."""
        return tuple(slot.name for bucket in self.buckets for slot in bucket.slots)

    @property
    def num_bytes(self) -> int:
        """The bytes of all buckets."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    def __str__(self) -> str:
        """Return one line a bucket: its number, dtype, bytes and what is in it."""
        return "\n".join(
            f"{number}: {describe_dtype(bucket.dtype)}, {bucket.num_bytes} bytes, "
            + shown([slot.name for slot in bucket.slots])
            for number, bucket in enumerate(self.buckets)
        )


def plan_buckets(
    parameters: Parameters,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    first_bucket_bytes: int | None = None,
    order: Sequence[str] | None = None,
) -> BucketPlan:
    """Assign trainable parameters to buckets, one dtype and device each.

    A bucket is closed before it would exceed ``bucket_bytes``; a larger parameter has one of its
    own. Buckets stand in the order in which their last gradient is expected.

    Args:
        parameters: A module, or (name, parameter) pairs in order of use, each parameter once.
        bucket_bytes: The most bytes of a bucket of several parameters.
        first_bucket_bytes: The same for the first bucket of each dtype and device, which is small
            so that something travels soon; None: 1 MiB, or ``bucket_bytes`` where that is less.
        order: The names in the order in which gradients become ready, each once; None: the
            reverse of the order of use.

    Returns:
        The plan; equal on all ranks whose parameters have equal names, shapes, strides, dtypes
        and order.

    Raises:
        UsageError: Something else is given; a parameter is given twice, is not a strided leaf or is
            not trained anywhere; a name is given twice; ``order`` has other names; a limit is not
            a positive int.
    """
    trained = trainable(parameters)
    _check_limit("bucket_bytes", bucket_bytes)
    if first_bucket_bytes is None:
        first_bucket_bytes = min(_FIRST_BYTES, bucket_bytes)
    _check_limit("first_bucket_bytes", first_bucket_bytes)
    names = _checked_order(trained, order)
    # Of each dtype and device: the buckets so far, each with the place in `names` of its last one.
    found: dict[tuple[torch.dtype, torch.device], list[tuple[int, list[Slot]]]] = {}
    for place, name in enumerate(names):
        parameter = trained[name]
        rows = found.setdefault((parameter.dtype, parameter.device), [])
        limit = first_bucket_bytes if len(rows) < 2 else bucket_bytes
        offset = _end(rows[-1][1]) if rows else 0
        if not rows or (offset + parameter.numel()) * parameter.itemsize > limit:
            rows.append((place, []))
            offset = 0
        slots = rows[-1][1]
        slots.append(Slot(name, tuple(parameter.shape), _dense_strides(parameter), offset))
        rows[-1] = (place, slots)
    ready = [
        (place, FlatBucket(dtype, device, tuple(slots)))
        for (dtype, device), rows in found.items()
        for place, slots in rows
    ]
    return BucketPlan(tuple(bucket for _, bucket in sorted(ready, key=lambda row: row[0])))


def _check_limit(name: str, limit: object) -> None:
    if not isinstance(limit, int) or limit < 1:
        raise UsageError(f"plan_buckets: {name}={limit!r} must be a positive number of bytes (int)")


def _checked_order(
    trained: Mapping[str, torch.Tensor], order: Sequence[str] | None
) -> Sequence[str]:
    if order is None:
        return list(trained)[::-1]
    if not isinstance(order, Sequence) or not all(isinstance(name, str) for name in order):
        raise UsageError(f"order must be a list of names, got {order!r}")
    if len(order) != len(trained) or set(order) != set(trained):
        missing = sorted(set(trained) - set(order))
        strange = sorted(set(order) - set(trained))
        raise UsageError(
            f"order must have each trained parameter once, got {len(order)} names for "
            f"{len(trained)} parameters; missing: {shown(missing) or 'none'}; unknown: "
            f"{shown(strange) or 'none'}"
        )
    return order


def _end(slots: Sequence[Slot]) -> int:
    return slots[-1].offset + slots[-1].numel


def _dense_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the strides that a copy of the parameter would have."""
    return tuple(torch.empty_like(parameter, device="meta").stride())
