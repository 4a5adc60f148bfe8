"""What a step trains on."""

from __future__ import annotations

import attrs

from trainwright.integration.errors import ConfigError
from trainwright.integration.settings.leaf import leaf
from trainwright.integration.values import positive

USUAL_BATCH = 16
USUAL_MICROBATCHES = 2


@attrs.frozen
class BatchSizes:
    """Sizes that fit: ``global_batch == micro_batch * microbatches * dp``."""

    global_batch: int
    micro_batch: int
    microbatches: int


@attrs.frozen
class BatchSettings:
    """Sizes of a global batch, of which any may be left to the others.

    Args:
        global_batch: sequences a step over all data ranks.
        micro_batch: sequences of a microbatch.
        microbatches: microbatches a data rank makes of its share of a global batch, whose gradients
            are accumulated.
        sequence_length: tokens a sequence.
        ramp_from: sequences of the first global batches, which then grow to ``global_batch``; None:
            they have that from the beginning.
        ramp_by: what they grow by at a time; None: as little as data ranks can share out.
        ramp_over: sequences of applied updates over which they grow.

    Raises:
        ConfigError: a part of a ramp is missing.
    """

    global_batch: int | None = leaf(
        None, f"sequences a step over all data ranks (default {USUAL_BATCH})", positive
    )
    micro_batch: int | None = leaf(
        None, "sequences of a microbatch (default: what the other two leave)", positive
    )
    microbatches: int | None = leaf(
        None,
        "microbatches a data rank makes of its share (default: what the others leave)",
        positive,
    )
    sequence_length: int = leaf(128, "tokens a sequence", positive)
    ramp_from: int | None = leaf(
        None, "sequences of the first global batches (default: all alike)", positive
    )
    ramp_by: int | None = leaf(
        None, "sequences by which global batches grow at a time (default: the least)", positive
    )
    ramp_over: int | None = leaf(
        None, "sequences of applied updates over which global batches grow", positive
    )

    def __attrs_post_init__(self) -> None:
        if (self.ramp_from is None) != (self.ramp_over is None):
            raise ConfigError(
                f"--ramp-from {self.ramp_from} and --ramp-over {self.ramp_over} belong together: "
                "how large the first batches are, and over how many sequences they grow"
            )
        if self.ramp_by is not None and self.ramp_from is None:
            raise ConfigError(
                f"--ramp-by {self.ramp_by} has no effect without --ramp-from and --ramp-over"
            )

    def sizes(self, dp: int, pp: int = 1) -> BatchSizes:
        """Return all sizes, from those that are set.

        Where only one of the three is set, a data rank makes one microbatch, or with a pipeline as
        many as it has ranks, which keeps it busy.

        Args:
            dp: data ranks.
            pp: ranks of a pipeline.

        Raises:
            ConfigError: they do not multiply out, with all numbers and what works.
        """
        whole, micro, count = self.global_batch, self.micro_batch, self.microbatches
        if whole is None and micro is None:
            whole, count = USUAL_BATCH, count or USUAL_MICROBATCHES
        if whole is None:
            count = count or pp
            whole = dp * (micro or 1) * count
        unit = dp * (micro or 1) * (count or 1)
        if whole % unit or (micro and count and whole != unit):
            raise ConfigError(_mismatch(whole, micro, count, dp))
        if micro is None and count is None:
            count = max(n for n in range(1, pp + 1) if whole // dp % n == 0)
        count = count or whole // unit
        return BatchSizes(whole, micro or whole // (dp * count), count)


def _mismatch(whole: int, micro: int | None, count: int | None, dp: int) -> str:
    given = {"micro_batch": micro, "microbatches": count, "dp": dp}
    product = " * ".join(f"{name}={size}" for name, size in given.items() if size is not None)
    unit = dp * (micro or 1) * (count or 1)
    if micro and count:
        rest = whole // (dp * micro)
        fits = f"microbatches={rest} or " if rest * dp * micro == whole else ""
        return f"global_batch={whole} must be {product} = {unit}; {fits}global_batch={unit} works"
    below = whole // unit * unit
    nearest = f"{below} or {below + unit}" if below else f"{unit}"
    return f"global_batch={whole} must be a multiple of {product} = {unit}; {nearest} works"
