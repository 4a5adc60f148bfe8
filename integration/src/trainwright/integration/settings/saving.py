"""Which checkpoints are written, and which stay."""

from __future__ import annotations

import attrs

from trainwright.integration.settings.leaf import leaf
from trainwright.integration.values import not_negative, positive


@attrs.frozen
class SavingSettings:
    """The checkpoints of a run.

    Args:
        save_every: steps between checkpoints; 0 saves at the end only.
        keep: checkpoints of the run that stay, the last ones; None for all. Of each snapshot that
            guards may go back to the last one before it stays as well.
        keep_every: steps whose checkpoints stay beside the last; None for no others.
        async_save: whether steps go on while a checkpoint is being written.
    """

    save_every: int = leaf(0, "steps between checkpoints, 0 for the end only", not_negative)
    keep: int | None = leaf(
        None, "checkpoints that stay: the last ones, and one a snapshot (default all)", positive
    )
    keep_every: int | None = leaf(
        None, "steps whose checkpoints stay beside the last (default none)", positive
    )
    async_save: bool = leaf(False, "go on while a checkpoint is being written")
