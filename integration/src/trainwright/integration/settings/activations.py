"""What backward passes need, and where it waits."""

from __future__ import annotations

import attrs

from trainwright.integration.settings.leaf import leaf
from trainwright.integration.values import one_of

CODECS = ("int8", "fp8", "bf16")


@attrs.frozen
class ActivationSettings:
    """What is kept of the forward pass.

    Args:
        recompute: ``none``, ``full``, ``every-K`` layers, ``sqrt``, ``selective`` (all but matrix
            products) or ``budget:BYTES`` a microbatch and stage.
        offload_activations: where what backward needs waits: ``cpu``, or a folder that exists; None
            leaves it where it is.
        compress_activations: codec of what backward needs; None leaves it as it is. Gradients are
            then those of rounded activations.
    """

    recompute: str = leaf("none", "none, full, every-K, sqrt, selective or budget:BYTES")
    offload_activations: str | None = leaf(None, "cpu, or a folder, until backward needs them")
    compress_activations: str | None = leaf(
        None, f"one of {', '.join(CODECS)}, until backward needs them", one_of(CODECS)
    )
