"""What may be done with saved bytes besides keeping them as they are, each at its own cost."""

from __future__ import annotations

import attrs

from .checks import fraction, identifier, non_negative, positive, whole


@attrs.frozen
class Offload:
    """Saved bytes are written elsewhere after the forward and read back for the backward.

    Args:
        name: How plans call it, as ``cpu``.
        write_bytes_per_s: Speed of the way out.
        read_bytes_per_s: Speed of the way back.
        overlap: Part of both transfers that is hidden behind computing, 0 to 1.
        staging_bytes: What may be under way at once; a plan that offloads has it set aside from
            the budget as a whole, since bytes in flight are still there.

    Raises:
        PlanError: A value is out of range.
    """

    name: str = attrs.field(validator=identifier)
    write_bytes_per_s: float = attrs.field(validator=positive)
    read_bytes_per_s: float = attrs.field(validator=positive)
    overlap: float = attrs.field(default=0.0, validator=fraction, kw_only=True)
    staging_bytes: int = attrs.field(default=0, validator=whole, kw_only=True)

    def seconds(self, num_bytes: int) -> float:
        """Return the time that is not hidden, both ways, of so many bytes."""
        shown = 1.0 - self.overlap
        return num_bytes * shown * (1.0 / self.write_bytes_per_s + 1.0 / self.read_bytes_per_s)

    def stays(self, num_bytes: int, able_bytes: int) -> int:
        """Return the bytes that stay where they were: none."""
        return 0

    def moves(self, num_bytes: int, able_bytes: int) -> int:
        """Return the bytes that are transferred: all."""
        return num_bytes


@attrs.frozen
class Compress:
    """Saved floating-point bytes are kept in fewer bits; gradients are no longer bitwise equal.

    Args:
        name: How plans call it, as ``int8``.
        ratio: Bytes kept for each byte compressed, scales included; more than 0, less than 1.
        encode_bytes_per_s: Speed of compressing, in bytes before it.
        decode_bytes_per_s: Speed of restoring, in bytes after it.

    Raises:
        PlanError: A value is out of range.
    """

    name: str = attrs.field(validator=identifier)
    ratio: float = attrs.field(validator=[positive, fraction])
    encode_bytes_per_s: float = attrs.field(validator=positive)
    decode_bytes_per_s: float = attrs.field(validator=positive)

    staging_bytes: int = attrs.field(default=0, init=False)

    def seconds(self, num_bytes: int) -> float:
        """Return the time of compressing and restoring so many bytes."""
        return num_bytes * (1.0 / self.encode_bytes_per_s + 1.0 / self.decode_bytes_per_s)

    def stays(self, num_bytes: int, able_bytes: int) -> int:
        """Return the bytes kept of ``num_bytes`` of which ``able_bytes`` can be compressed."""
        return num_bytes - able_bytes + -int(-able_bytes * self.ratio // 1)

    def moves(self, num_bytes: int, able_bytes: int) -> int:
        """Return the bytes that are compressed."""
        return able_bytes


@attrs.frozen
class Partial:
    """A layer keeps some of its saved bytes and recomputes the others within its backward.

    Such as selective recomputation, or what the planner of operators found for this layer.

    Args:
        name: How plans call it, as ``selective``.
        saved_bytes: Bytes kept besides the layer's input.
        extra_s: Time of the recomputation.

    Raises:
        PlanError: A value is out of range.
    """

    name: str = attrs.field(validator=identifier)
    saved_bytes: int = attrs.field(validator=whole)
    extra_s: float = attrs.field(validator=non_negative)


Choice = Offload | Compress
