"""Counting elements in pieces or by a sample, over ranks, with the error that a sample leaves."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs
import torch

from trainwright.collectives import Communicator, ReduceOp
from trainwright.collectives.random import Key, uniform
from trainwright.precision.errors import PrecisionError
from trainwright.precision.gradients import local_values

NamedTensors = Mapping[str, torch.Tensor | None] | Iterable[tuple[str, torch.Tensor | None]]

PIECE = 1 << 16
"""Elements of a piece: in float32 it fits in a core's cache with what is made of it."""

_NUM_MOMENTS = 5
_DIGEST_BITS = 20
# Shapes: K counts of a tensor, M moments of each.


@attrs.frozen
class Sample:
    """Which elements of a tensor are looked at, on each rank: random ones, with repetition.

    Args:
        max_elements: how many; a tensor with no more is looked at as a whole.
        seed: of the drawing.
        step: another step draws other elements.

    Raises:
        PrecisionError: there would be no element.
    """

    max_elements: int = attrs.field()
    seed: int = 0
    step: int = 0

    @max_elements.validator
    def _check_max_elements(self, _: object, value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PrecisionError(f"max_elements must be a whole number from 1, got {value!r}")


@attrs.frozen
class Share:
    """A part of a whole, counted or estimated.

    Args:
        part: elements that it is about, of all ranks; estimated where only some were looked at.
        whole: elements that there are to lose.
        error: standard error of ``value``, 0.0 where every element was looked at. Where a sample
            meets none or only such elements it is that of one or two more draws that differ.
    """

    part: float
    whole: float
    error: float = 0.0

    @property
    def value(self) -> float:
        """The share, 0.0 of nothing."""
        return self.part / self.whole if self.whole else 0.0

    def __str__(self) -> str:
        """Return the share as a percentage, with its standard error where it has one."""
        exact = f"{self.value:.3%}"
        return f"{exact} ± {self.error:.3%}" if self.error else exact


@attrs.frozen
class Tally:
    """What one rank saw of one tensor, kept on the tensor's device.

    Args:
        num_elements: elements that it holds.
        num_looked_at: elements that it looked at.
        moments: [K, M] float64 estimates: part, whole, their variances and their covariance.
    """

    num_elements: int
    num_looked_at: int
    moments: torch.Tensor


@attrs.frozen
class Total:
    """What all ranks saw of one tensor."""

    num_elements: int
    num_looked_at: int
    shares: tuple[Share, ...]


def as_named(tensors: NamedTensors) -> list[tuple[str, torch.Tensor | None]]:
    """Return (name, what this rank holds) pairs, or raise for what has no digits to lose."""
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    named: list[tuple[str, torch.Tensor | None]] = []
    for name, tensor in pairs:
        if tensor is None:
            named.append((name, None))
            continue
        if not tensor.is_floating_point():
            raise PrecisionError(f"{name} must be floating-point, got {tensor.dtype}")
        named.append((name, local_values(name, tensor.detach())))
    return named


def flat(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return the elements in the order of memory, without a copy where they have no gaps.

    Args:
        tensor: of any shape.
        like: another tensor of that shape, whose order in memory is taken; None: its own.
    """
    strides = (tensor if like is None else like).stride()
    order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
    return tensor.permute(order).reshape(-1)


def cut(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield pieces of a flat tensor: in a core's cache on a CPU, larger ones elsewhere."""
    size = PIECE if values.device.type == "cpu" else PIECE << 8
    for start in range(0, values.numel(), size):
        yield values[start : start + size]


def positions(
    values: torch.Tensor, sample: Sample | None, communicator: Communicator | None
) -> torch.Tensor | None:
    """Return the places in a flat tensor that a sample looks at; None: all of them."""
    if sample is None or values.numel() <= sample.max_elements:
        return None
    rank = communicator.rank if communicator is not None else 0
    # Errors of ranks add up as those of independent draws; one tensor's draws may serve the next.
    key = Key(sample.seed, f"health of rank {rank}", sample.step)
    drawn = uniform(key, (sample.max_elements,), dtype=torch.float64, device=values.device)
    return (drawn * values.numel()).long()


def tally(
    num_elements: int, num_looked_at: int, part_K: torch.Tensor, whole_K: torch.Tensor | None = None
) -> Tally:
    """Extrapolate counts to all elements of this rank, with variances; makes no host wait.

    Args:
        num_elements: elements that this rank holds.
        num_looked_at: elements that were counted, with repetition.
        part_K: counts, each of elements that are counted in ``whole_K`` too.
        whole_K: counts; None: all elements.
    """
    part = part_K.to(torch.float64) / num_looked_at
    whole = torch.ones_like(part) if whole_K is None else whole_K / num_looked_at
    spread = num_elements**2 / num_looked_at if num_looked_at < num_elements else 0.0
    # Moved towards one half, or a sample that met nothing would claim to be exact.
    cautious = (part * num_looked_at + 1) / (num_looked_at + 2)
    # One where all was looked at, so that counts stay whole numbers.
    weight = num_elements / num_looked_at
    moments = [
        part_K * weight,
        (torch.full_like(part, num_looked_at) if whole_K is None else whole_K) * weight,
        spread * cautious * (1 - cautious),
        spread * whole * (1 - whole),
        spread * part * (1 - whole),
    ]
    return Tally(num_elements, num_looked_at, torch.stack(moments, dim=1))


def add_up(
    names: Sequence[str],
    tallies: Sequence[Tally | None],
    num_counts: int,
    communicator: Communicator | None,
) -> list[Total]:
    """Add the tallies of all ranks by one all-reduce; None stands for no element on this rank.

    Raises:
        PrecisionError: the ranks' names differ; raised on every rank.
    """
    device = communicator.device if communicator is not None else torch.device("cpu")
    digest = zlib.crc32("\n".join(names).encode()) >> (32 - _DIGEST_BITS)
    sizes = [(t.num_elements, t.num_looked_at) if t else (0, 0) for t in tallies]
    head = [1.0, digest, digest**2, *(size for pair in sizes for size in pair)]
    nothing = torch.zeros(num_counts, _NUM_MOMENTS, dtype=torch.float64, device=device)
    moments = [t.moments.to(device) if t else nothing for t in tallies]
    packed = torch.cat(
        [torch.tensor(head, dtype=torch.float64, device=device), *(m.reshape(-1) for m in moments)]
    )
    if communicator is not None:
        communicator.all_reduce(packed, ReduceOp.SUM).wait()
    numbers = packed.tolist()
    num_ranks, digests, squares = (int(number) for number in numbers[:3])
    if num_ranks * squares != digests**2:
        raise PrecisionError(
            "ranks give different names of tensors; give all names in the same order on each "
            "rank, with None for what it does not hold"
        )
    counted, rest = numbers[3 : 3 + 2 * len(names)], numbers[3 + 2 * len(names) :]
    shares = [_share(*rest[i : i + _NUM_MOMENTS]) for i in range(0, len(rest), _NUM_MOMENTS)]
    return [
        Total(
            int(counted[2 * i]),
            int(counted[2 * i + 1]),
            tuple(shares[i * num_counts : (i + 1) * num_counts]),
        )
        for i in range(len(names))
    ]


def _share(part: float, whole: float, of_part: float, of_whole: float, both: float) -> Share:
    if whole == 0.0:
        return Share(part, whole)
    # The variance of a quotient of two estimates, to first order.
    ratio = part / whole
    variance = of_part - 2 * ratio * both + ratio**2 * of_whole
    return Share(part, whole, math.sqrt(max(variance, 0.0)) / whole)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return lines whose first column is aligned left and whose others are aligned right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if column else text.ljust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
