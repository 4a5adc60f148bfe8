"""Random generators of which each rank has its own, in checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from trainwright.checkpointing.errors import CheckpointingWarning, TreeError
from trainwright.collectives import Communicator, ShardSpec
from trainwright.collectives.random import Key

from .tree import Sharded, Tree

_KNOWN = "is_saved"


@attrs.frozen(eq=False)
class RankGenerators:
    """This rank's generators as a part of a tree: of each a row for every rank, none for another.

    In the layout that saved them each rank gets its own position back. No other layout has the same
    ranks: there all are seeded anew, each rank and step in its own way, with a
    `CheckpointingWarning` on the first rank.

    Args:
        generators: By name; all ranks have the same names, on devices of one kind.
        comm: The ranks.
        layout: What has to be the same for a rank to be the same rank, such as the mesh's sizes.
        seed: From which, with name, rank, layout and step, generators are seeded anew.

    Raises:
        TreeError: A name or the layout cannot be a key of a tree.
    """

    generators: Mapping[str, torch.Generator]
    comm: Communicator
    layout: str
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        for key in (self.layout, *self.generators):
            if not isinstance(key, str) or not key or "/" in key or key == _KNOWN:
                raise TreeError(f"generators and layout need names without '/', got {key!r}")

    def tree(self) -> Tree:
        """Return copies of the positions, for `StateStore.save`."""
        states = {name: generator.get_state() for name, generator in self.generators.items()}
        return self._tree(states, is_saved=True)

    def target(self) -> Tree:
        """Return what `StateStore.load_partial` fills, for `restore`; `load` in one layout only."""
        states = {
            name: torch.zeros_like(generator.get_state())
            for name, generator in self.generators.items()
        }
        return self._tree(states, is_saved=False)

    def restore(self, loaded: Mapping[str, Any], step: int) -> None:
        """Set the generators to the positions that were loaded, or seed them anew.

        Args:
            loaded: What a load has made of `target`.
            step: The checkpoint's step.
        """
        states = loaded[self.layout]
        if states[_KNOWN]:
            for name, generator in self.generators.items():
                generator.set_state(states[name].tensor)
            return
        for name, generator in self.generators.items():
            # With the step, so that no part of a run draws what an earlier one drew.
            place = f"{name} of rank {self.comm.rank} in {self.layout} from step {step}"
            low, high = Key(self.seed, place).words
            generator.manual_seed(low << 32 | high)
        if self.generators and self.comm.rank == 0:
            warnings.warn(
                f"step {step} has no positions of the generators {', '.join(self.generators)} for "
                f"layout {self.layout}; they were seeded anew, and draw other numbers than without "
                "the stop",
                CheckpointingWarning,
                stacklevel=2,
            )

    def _tree(self, states: Mapping[str, torch.Tensor], *, is_saved: bool) -> Tree:
        rank, size = self.comm.rank, self.comm.size
        rows: dict[str, Any] = {_KNOWN: is_saved}
        for name, state in states.items():
            length = state.numel()
            whole = ShardSpec.full(name, (size, length))
            rows[name] = Sharded(state, whole.narrow(rank * length, (rank + 1) * length))
        return {self.layout: rows}
