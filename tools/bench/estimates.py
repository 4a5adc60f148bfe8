"""What ranks of large runs hold, as the README says: ``python -m tools.bench.estimates``.

Nothing is timed or built; the figures are `trainwright estimate`'s.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from trainwright.integration.config import RunConfig
from trainwright.integration.estimate_report import Loaded, loaded_ranks
from trainwright.integration.model import ModelShape

GIB = 2**30

SEVENTY = ModelShape(
    vocabulary=128_256, width=8192, layers=80, heads=64, kv_heads=8, mlp_width=28_672
)
LARGEST = ModelShape(
    vocabulary=128_256, width=16_384, layers=126, heads=128, kv_heads=8, mlp_width=53_248
)
SIXTY_FOUR: Mapping[str, Any] = {
    "layout": "dp=8,tp=8",
    "sequence_parallel": True,
    "dtype": "bfloat16",
    "sequence_length": 8192,
    "micro_batch": 1,
    "microbatches": 1,
    "recompute": "full",
}
THOUSANDS: Mapping[str, Any] = {
    **SIXTY_FOUR,
    "layout": "dp=128,tp=8,pp=16",
    "microbatches": 16,
    "zero": 1,
}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "zero 0": {"zero": 0},
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2},
    "zero 3": {"zero": 3},
    "zero 1, offload optimizer": {"zero": 1, "offload": "optimizer"},
    "zero 2, offload optimizer": {"zero": 2, "offload": "optimizer"},
    "zero 3, offload optimizer": {"zero": 3, "offload": "optimizer"},
    "zero 3, offload parameters": {"zero": 3, "offload": "parameters"},
    "zero 3, offload nvme:DIR": {"zero": 3, "offload": "nvme:/tmp"},
}
RECOMPUTED: Mapping[str, Mapping[str, Any]] = {
    f"recompute {way}": {"recompute": way} for way in ("none", "selective", "full")
}


def main() -> int:
    """Print a table for each of the two models."""
    _print("70 billion parameters, dp=8,tp=8, 8192 tokens", SEVENTY, SIXTY_FOUR, WAYS)
    _print("405 billion, dp=128,tp=8,pp=16, zero 1", LARGEST, THOUSANDS, RECOMPUTED)
    return 0


def _print(
    title: str, shape: ModelShape, base: Mapping[str, Any], ways: Mapping[str, Mapping[str, Any]]
) -> None:
    head = ["weights", "gradients", "states", "activations", "all", "in host", "in file"]
    print(f"| {title}; GiB | {' | '.join(head)} |")
    print(f"|---|{'---:|' * len(head)}")
    for name, leaves in ways.items():
        config = RunConfig.of(**{**base, **leaves})
        fullest = max(loaded_ranks(config, shape), key=lambda each: each.memory.total)
        print(f"| {name} | {' | '.join(_cells(fullest))} |")
    print()


def _cells(rank: Loaded) -> list[str]:
    held = rank.memory
    first = [held.weights + held.gathered, held.gradients + held.reduce, held.states]
    rest = [held.activations + held.logits + held.workspace, held.total, held.host, held.file]
    return [f"{value / GIB:.1f}" if value else "" for value in (*first, *rest)]


if __name__ == "__main__":
    sys.exit(main())
