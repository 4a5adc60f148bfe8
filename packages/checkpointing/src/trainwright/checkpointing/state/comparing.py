"""Compares two checkpoints of any formats, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import attrs
import torch

from trainwright.collectives import ShardSpec

from .dtypes import dtype_name, flat_bytes

_COMPARED_ELEMENTS = 1 << 22  # at a time, of each of the two


class Readable(Protocol):
    """A tensor that is known, and read where it is asked for."""

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its global shape."""
        ...

    def read(self, spec: ShardSpec) -> torch.Tensor:
        """Return the part of it that ``spec`` says."""
        ...


@attrs.frozen(eq=False)
class Contents:
    """What a checkpoint of any format holds: tensors and plain values by path."""

    tensors: Mapping[str, Readable]
    plain: Mapping[str, Any]


@attrs.frozen
class Differences:
    """How a second checkpoint differs from a first one.

    Args:
        missing: Paths that only the first one has.
        extra: Paths that only the second one has.
        plain: Path, value in the first, value in the second.
        tensors: Path, and what differs in it.
    """

    missing: tuple[str, ...]
    extra: tuple[str, ...]
    plain: tuple[tuple[str, Any, Any], ...]
    tensors: tuple[tuple[str, TensorDifference], ...]

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self.missing or self.extra or self.plain or self.tensors)


@attrs.frozen
class TensorDifference:
    """What differs between two tensors of one path.

    Args:
        kinds: Dtype and shape of both, where these differ.
        count: Elements whose bits differ; None where the kinds differ.
        largest: The largest absolute difference; NaN where one is a NaN or an infinity and the
            other is not the same one.
    """

    kinds: tuple[str, str] | None
    count: int | None
    largest: float | None


def compare(first: Contents, second: Contents) -> Differences:
    """Return how ``second`` differs from ``first``, bit for bit.

    Extra memory: a few times 4 Mi elements.

    Raises:
        CheckpointingError: One of the two cannot be read.
    """
    ours, theirs = _names(first), _names(second)
    tensors: list[tuple[str, TensorDifference]] = []
    for name, tensor in first.tensors.items():
        other = second.tensors.get(name)
        difference = None if other is None else _compare_tensors(name, tensor, other)
        if difference is not None:
            tensors.append((name, difference))
    plain = tuple(
        (name, value, second.plain[name])
        for name, value in first.plain.items()
        if name in second.plain and not _is_equal(value, second.plain[name])
    )
    missing = tuple(name for name in ours if name not in theirs)
    extra = tuple(name for name in theirs if name not in ours)
    return Differences(missing, extra, plain, tuple(tensors))


def _names(contents: Contents) -> dict[str, None]:
    """Return all paths; one that is a tensor here and a plain value there counts as two."""
    return dict.fromkeys([*contents.tensors, *(f"{name} (value)" for name in contents.plain)])


def _compare_tensors(name: str, a: Readable, b: Readable) -> TensorDifference | None:
    kinds = tuple(f"{dtype_name(t.dtype)} {list(t.shape)}" for t in (a, b))
    if kinds[0] != kinds[1]:
        return TensorDifference((kinds[0], kinds[1]), None, None)
    count = 0
    largest: list[float] = []
    for spec in _cuts(name, a.shape):
        x, y = a.read(spec), b.read(spec)
        size = x.dtype.itemsize
        differs = (flat_bytes(x) != flat_bytes(y)).view(-1, size).any(dim=1)
        if differs.any():
            count += int(differs.sum())
            largest.append(_largest(x.view(-1)[differs], y.view(-1)[differs]))
    if not count:
        return None
    worst = float("nan") if any(value != value for value in largest) else max(largest)
    return TensorDifference(None, count, worst)


def _largest(x: torch.Tensor, y: torch.Tensor) -> float:
    if not (x.is_floating_point() or x.is_complex()):
        # As Python's integers: float64 cannot tell neighbours beyond 2**53 apart.
        return float(max(abs(int(p) - int(q)) for p, q in zip(x.tolist(), y.tolist(), strict=True)))
    wide = torch.complex128 if x.is_complex() else torch.float64
    return float((x.to(wide) - y.to(wide)).abs().max())


def _cuts(name: str, shape: tuple[int, ...]) -> Iterator[ShardSpec]:
    whole = ShardSpec.full(name, shape)
    for at in range(0, whole.numel, _COMPARED_ELEMENTS):
        yield whole.narrow(at, min(at + _COMPARED_ELEMENTS, whole.numel))


def _is_equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(_is_equal(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b))
    return bool(a == b or (a != a and b != b))
