"""All-reduce of what a codec makes of the contributions, and then of the sums.

Each rank sums one part of the tensor: encoded parts go to their owners, who add in float32 and send
the sum, encoded, to all. ``n`` is the number of ranks and e the bytes of one encoded part
(`Packing.num_bytes`) of ceil(numel / n) elements.

Source: Tang et al.: 1-bit Adam (2021), section 3.3, for the two rounds and the feedback of both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainwright.collectives.checks import check_tensor, check_writable, resolve_reduce_dtype
from trainwright.collectives.codec.protocol import Codec
from trainwright.collectives.codec.transfer import (
    add_residual,
    check_codec,
    start_gather,
    start_scatter,
)
from trainwright.collectives.errors import UsageError
from trainwright.collectives.protocol import Communicator, ReduceOp, Work


def compressed_all_reduce(
    comm: Communicator,
    tensor: torch.Tensor,
    codec: Codec,
    op: ReduceOp = ReduceOp.SUM,
    *,
    timeout_s: float | None = None,
) -> Work:
    """Sum or average ``tensor`` over all ranks, in place; every rank gets the same bits.

    An element is summed by its owner: the tensor, flat and filled up with zeros, is cut into n
    equal parts. The owner's own contribution does not travel and is taken as it is; sums are in
    rank order in float32 (float64 for float64 tensors) and encoded once.

    Args:
        comm: The ranks.
        tensor: Floating point, any shape and strides; alike on all ranks. Belongs to the Work.
        codec: The same on all ranks.
        op: SUM or AVG.
        timeout_s: How long the peers may take in each round.

    Returns:
        A Work. Waiting for it starts the second round, so all ranks wait at the same place among
        their other calls. An element is off by at most the sum of ``codec.error_bound`` of the
        contributions of those who do not own it (divided by n for AVG), and that of the encoded
        part of sums, and the rounding of the sum.

    Raises:
        UsageError: The tensor cannot be written or is not one that the codec encodes; ``codec`` is
            none; ``op`` is another one.

    Communicates:
        One all-to-all now, one all-gather in ``wait``: a rank sends ``2 * (n - 1) * e`` bytes.
    """
    what = "compressed_all_reduce"
    source = _checked(what, comm, tensor, codec, op)
    return _start(comm, source, source, codec, op, timeout_s)


def compressed_all_reduce_with_feedback(
    comm: Communicator,
    tensor: torch.Tensor,
    codec: Codec,
    residual: torch.Tensor | None,
    op: ReduceOp = ReduceOp.SUM,
    *,
    timeout_s: float | None = None,
) -> tuple[Work, torch.Tensor]:
    """Reduce ``tensor + residual`` as `compressed_all_reduce` does; return what that lost.

    Args:
        comm: The ranks.
        tensor: As there.
        codec: As there.
        residual: What the call before returned, float32 (float64 for float64 tensors) in the shape
            of ``tensor``; None at first. Not needed after the call.
        op: SUM or AVG.
        timeout_s: As there.

    Returns:
        The Work, and the residual for the next call, right once the Work has been waited for: what
        this rank's contributions lost, and in the part that it owns what the sums lost. The
        results of all calls, and the last residuals of all ranks added (divided by n for AVG), are
        the sum of the inputs but for rounding in the residual's dtype. It is NaN after an
        overflow: begin anew with None.

    Raises:
        UsageError: As there, or ``residual`` is of another shape, dtype or device.

    Communicates:
        As there.
    """
    what = "compressed_all_reduce_with_feedback"
    source = _checked(what, comm, tensor, codec, op)
    total = add_residual(what, source, residual)
    rows = _rows(source, comm)
    lost = total.new_zeros(comm.size * rows)
    work = _start(comm, source, total, codec, op, timeout_s, lost)
    return work, lost[: source.numel()].view(source.shape)


class _TwoRoundWork:
    """The Work of the first round; waiting for it runs the second."""

    __slots__ = ("_first", "_second", "_start_second")

    def __init__(self, first: Work, start_second: Callable[[], Work]) -> None:
        self._first: Work | None = first
        self._second: Work | None = None
        self._start_second = start_second

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for both rounds, and write the result."""
        if self._first is not None:
            self._first.wait(timeout_s)
            with torch.no_grad():
                self._second = self._start_second()
            self._first = None  # not before: what cannot be started is not over
        if self._second is not None:
            self._second.wait(timeout_s)
            self._second = None

    def is_done(self, within_s: float = 0.0) -> bool:
        """Return whether it has been waited for: before, the second round cannot have begun."""
        return self._first is None and (self._second is None or self._second.is_done(within_s))


class _WritingWork:
    """A Work that writes what has come in front of the filling to where it belongs."""

    __slots__ = ("_target", "_whole", "_work")

    def __init__(self, work: Work, target: torch.Tensor, whole: torch.Tensor) -> None:
        self._work = work
        self._target = target
        self._whole: torch.Tensor | None = whole

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait, then write."""
        self._work.wait(timeout_s)
        whole = self._whole
        if whole is not None:
            with torch.no_grad():
                self._target.copy_(whole[: self._target.numel()].view(self._target.shape))
            self._whole = None

    def is_done(self, within_s: float = 0.0) -> bool:
        """Return whether everything has come, written or not."""
        return self._work.is_done(within_s)


def _start(
    comm: Communicator,
    target: torch.Tensor,
    source: torch.Tensor,
    codec: Codec,
    op: ReduceOp,
    timeout_s: float | None,
    lost: torch.Tensor | None = None,
) -> Work:
    """Start the first round; into ``lost``, flat and filled up, goes what both rounds lose."""
    rows = _rows(target, comm)
    filled = source.new_zeros(comm.size * rows)
    filled[: source.numel()].view(source.shape).copy_(source)
    own = torch.empty(rows, dtype=_wide(target), device=target.device)
    first = start_scatter(comm, own, filled, codec, op, timeout_s, lost)

    def start_second() -> Work:
        parts = codec.encode(own)
        if lost is not None:
            # What is rounded to the tensor's dtype is lost as well.
            rest = own - codec.decode(parts, own.shape, target.dtype)
            weight = comm.size if op is ReduceOp.AVG else 1
            torch.mul(rest, weight, out=lost[comm.rank * rows : (comm.rank + 1) * rows])
        whole = target.new_empty(comm.size * rows)
        work = start_gather(comm, whole, own, codec, parts, timeout_s)
        return _WritingWork(work, target, whole)

    return _TwoRoundWork(first, start_second)


def _checked(
    what: str, comm: Communicator, tensor: torch.Tensor, codec: Codec, op: ReduceOp
) -> torch.Tensor:
    check_codec(what, codec)
    source = check_tensor(what, tensor, comm.device)
    check_writable(what, source)
    resolve_reduce_dtype(what, source.dtype, op, None)
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise UsageError(
            f"{what}: op={op.name}, but the error is bounded for SUM and AVG only; use "
            "comm.all_reduce for others"
        )
    return source


def _rows(tensor: torch.Tensor, comm: Communicator) -> int:
    return -(-tensor.numel() // comm.size)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32
