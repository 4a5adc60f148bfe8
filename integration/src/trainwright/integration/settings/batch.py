"""What a step trains on."""

from __future__ import annotations

import attrs

from trainwright.integration.settings.leaf import leaf
from trainwright.integration.values import positive


@attrs.frozen
class BatchSettings:
    """Sizes of a global batch.

    Args:
        global_batch: sequences a step over all data ranks.
        microbatches: microbatches a data rank makes of its share of a global batch.
        sequence_length: tokens a sequence.
    """

    global_batch: int = leaf(16, "sequences a step over all data ranks", positive)
    microbatches: int = leaf(2, "microbatches a data rank makes of its share", positive)
    sequence_length: int = leaf(128, "bytes a sequence", positive)
