"""What a rank holds, by kind, and what that depends on besides sizes: plain values."""

from __future__ import annotations

import attrs

from trainwright.sharding.errors import ShardingError
from trainwright.sharding.memory.parameters import Slice
from trainwright.sharding.memory.states import BucketStates

KINDS = (
    "weights",
    "gradients",
    "states",
    "activations",
    "logits",
    "gathered units",
    "reduce buffers",
    "workspace",
    "reserve",
)
"""What a rank's memory is for, in the order of tables and pictures."""


@attrs.frozen
class RankMemory:
    """What one rank holds at the moment when it holds most, in bytes.

    Args:
        weights: Of its parameters between steps, buffers among them.
        gradients: Of what is kept of gradients between microbatches.
        states: Masters apart from the weights, and the optimizer's.
        activations: Of all microbatches in flight, what their backwards need but the logits.
        logits: Of the last stage, or of their gradients after them.
        gathered: Weights that are whole only for their use, at stage 3.
        reduce: Gradients that are whole only until they are reduced, at stages 2 and 3, and what
            travels in another format.
        workspace: What comes and goes within an operator.
        reserve: For fragmentation, a share of everything else.
        moment: What the rank is doing then.
        host: Model states that are in host memory instead; not of the device, so in no sum here.
        file: Those that are in a file instead.
    """

    weights: int
    gradients: int
    states: int
    activations: int = 0
    logits: int = 0
    gathered: int = 0
    reduce: int = 0
    workspace: int = 0
    reserve: int = 0
    moment: str = "between steps"
    host: int = 0
    file: int = 0

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes by the names of `KINDS`."""
        values = attrs.astuple(self)[: len(KINDS)]
        return dict(zip(KINDS, values, strict=True))

    @property
    def model_states(self) -> int:
        """Bytes that live from step to step."""
        return self.weights + self.gradients + self.states

    @property
    def allocated(self) -> int:
        """Bytes of all tensors."""
        return sum(self.by_kind.values()) - self.reserve

    @property
    def total(self) -> int:
        """Bytes of all tensors and the reserve."""
        return sum(self.by_kind.values())


@attrs.frozen
class Chunk:
    """One stage of the pipeline on a rank, and its parameters.

    Args:
        part: Which blocks it has.
        buckets: What the rank holds of their states.
    """

    part: Slice
    buckets: tuple[BucketStates, ...]


@attrs.frozen
class InFlight:
    """Microbatches whose activations a rank holds when a backward begins.

    Args:
        held: Of each of its chunks, that microbatch among them.
        chunk: Whose backward it is.
        follows: Chunks that have had a backward in this step, so that their gradients are whole.
        waiting: Of each chunk, those whose input gradients are done and weight gradients are not;
            empty: none.
        splits: Whether this backward leaves weight gradients for later.
    """

    held: tuple[int, ...]
    chunk: int = 0
    follows: frozenset[int] = frozenset()
    waiting: tuple[int, ...] = ()
    splits: bool = False


@attrs.frozen
class Traffic:
    """When weights are whole and gradients are reduced.

    Args:
        live_units: At stage 3, units that are whole at once; None: all of a chunk are.
        all_chunks: Whether those of the other chunks are whole meanwhile.
        live_reductions: At stages 2 and 3, units whose gradients are whole at once in a backward
            that ends with its reduction: the one that is written, and those that are under way.
        reduce_each_backward: Whether every backward does.
        wire_bytes: Of a gradient as it travels; 0: as it is.
        reserve: Share of all other memory that fragmentation is given.
    """

    live_units: int | None = 2
    all_chunks: bool = True
    live_reductions: int = 2
    reduce_each_backward: bool = False
    wire_bytes: int = 0
    reserve: float = 0.0

    def __attrs_post_init__(self) -> None:
        if not 0.0 <= self.reserve < 1.0:
            raise ShardingError(f"reserve is a share from 0 to below 1, got {self.reserve}")
