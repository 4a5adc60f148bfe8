"""All-gather and reduce-scatter of what a codec makes of the tensors.

Each function encodes at once and starts one message to each rank; its `Work` decodes when it is
waited for. ``n`` is the number of ranks and e the bytes of one encoded part (`Packing.num_bytes`):
with block INT8 of 128 elements 1.03 an element instead of 4 or 2.

Error feedback adds what the last call lost to what this one sends, so that over many steps nothing
is lost but a bounded rest. It is state in and state out: the ``residual`` that a call returns
goes into the next.

Source: Seide et al.: 1-bit stochastic gradient descent (Interspeech 2014) for the feedback; Wang
et al.: ZeRO++ (2023), sections 3.1 and 3.3, for what travels.
"""

from __future__ import annotations

import torch

from trainwright.collectives.codec.protocol import Codec
from trainwright.collectives.codec.transfer import (
    add_residual,
    check_gather,
    check_scatter,
    start_gather,
    start_scatter,
)
from trainwright.collectives.errors import UsageError
from trainwright.collectives.protocol import Communicator, ReduceOp, Work

_SUMS = (ReduceOp.SUM, ReduceOp.AVG)


def compressed_all_gather(
    comm: Communicator,
    output: torch.Tensor,
    input: torch.Tensor,
    codec: Codec,
    *,
    timeout_s: float | None = None,
) -> Work:
    """Put what every rank's ``input`` [m, ...] decodes to into ``output`` [n * m, ...].

    Every rank gets the same bits, its own part included: that too is what the encoded form says.

    Args:
        comm: The ranks.
        output: Any strides; all ranks alike in shape and dtype. Belongs to the Work.
        input: Floating point; may be this rank's part of ``output``. Not needed after the call.
        codec: The same on all ranks.
        timeout_s: How long the peers may take.

    Returns:
        A Work; ``output`` is right once it has been waited for. Each element is within
        ``codec.error_bound`` of the sender's.

    Raises:
        UsageError: Shapes or dtypes do not fit, or the codec is none or does not encode the dtype.

    Communicates:
        One all-gather: a rank sends ``(n - 1) * e`` bytes.
    """
    source = check_gather("compressed_all_gather", comm, output, input, codec)
    return start_gather(comm, output, source, codec, codec.encode(source), timeout_s)


def compressed_all_gather_with_feedback(
    comm: Communicator,
    output: torch.Tensor,
    input: torch.Tensor,
    codec: Codec,
    residual: torch.Tensor | None,
    *,
    timeout_s: float | None = None,
) -> tuple[Work, torch.Tensor]:
    """Gather ``input + residual`` as `compressed_all_gather` does; return what that lost.

    Args:
        comm: The ranks.
        output: As there.
        input: As there.
        codec: As there.
        residual: What the call before returned, float32 (float64 for float64 tensors) in the shape
            of ``input``; None at first. Not needed after the call.
        timeout_s: As there.

    Returns:
        The Work, and the residual for the next call, right at once: the sum over the calls of what
        was gathered and the last residual is the sum of the inputs, but for rounding in the
        residual's dtype (and in the output's, which is not fed back).

    Raises:
        UsageError: As there, or ``residual`` is of another shape, dtype or device.

    Communicates:
        As there.
    """
    what = "compressed_all_gather_with_feedback"
    source = check_gather(what, comm, output, input, codec)
    total = add_residual(what, source, residual)
    parts = codec.encode(total)
    lost = total - codec.decode(parts, total.shape, total.dtype)
    return start_gather(comm, output, total, codec, parts, timeout_s), lost


def compressed_reduce_scatter(
    comm: Communicator,
    output: torch.Tensor,
    input: torch.Tensor,
    codec: Codec,
    op: ReduceOp = ReduceOp.SUM,
    *,
    timeout_s: float | None = None,
) -> Work:
    """Combine what all ranks' ``input`` [n * m, ...] decode to; rank r keeps rows r*m..(r+1)*m.

    Contributions are encoded once, by their rank, and added in rank order in float32 (float64 for
    float64 tensors); the result is rounded once. A rank's own contribution does not travel and is
    taken as it is.

    Args:
        comm: The ranks.
        output: [m, ...], any strides; all ranks alike in shape and dtype. Belongs to the Work.
        input: Floating point; only read, and not needed after the call. ``output`` may be this
            rank's part of it.
        codec: The same on all ranks.
        op: How contributions are combined.
        timeout_s: How long the peers may take.

    Returns:
        A Work; ``output`` is right once it has been waited for. A sum is off by at most the sum of
        ``codec.error_bound`` over the other ranks, and the rounding of the sum.

    Raises:
        UsageError: Shapes or dtypes do not fit, the codec is none or does not encode the dtype, or
            ``op`` has no meaning for it.

    Communicates:
        One all-to-all: a rank sends ``(n - 1) * e`` bytes.
    """
    what = "compressed_reduce_scatter"
    source = check_scatter(what, comm, output, input, codec, op)
    return start_scatter(comm, output, source, codec, op, timeout_s)


def compressed_reduce_scatter_with_feedback(
    comm: Communicator,
    output: torch.Tensor,
    input: torch.Tensor,
    codec: Codec,
    residual: torch.Tensor | None,
    op: ReduceOp = ReduceOp.SUM,
    *,
    timeout_s: float | None = None,
) -> tuple[Work, torch.Tensor]:
    """Reduce ``input + residual`` as `compressed_reduce_scatter` does; return what that lost.

    Args:
        comm: The ranks.
        output: As there.
        input: As there.
        codec: As there.
        residual: What the call before returned, float32 (float64 for float64 tensors) in the shape
            of ``input``; None at first. Not needed after the call.
        op: SUM or AVG: of what was lost, only sums can be made up for.
        timeout_s: As there.

    Returns:
        The Work, and the residual for the next call, right at once: zero in this rank's own rows.

    Raises:
        UsageError: As there; ``residual`` is of another shape, dtype or device; ``op`` is no sum.

    Communicates:
        As there.
    """
    what = "compressed_reduce_scatter_with_feedback"
    source = check_scatter(what, comm, output, input, codec, op)
    if op not in _SUMS:
        raise UsageError(
            f"{what}: op={op.name}, but only what SUM and AVG lose can be added to the next call; "
            "use compressed_reduce_scatter"
        )
    total = add_residual(what, source, residual)
    lost = torch.zeros_like(total)
    return start_scatter(comm, output, total, codec, op, timeout_s, lost), lost
