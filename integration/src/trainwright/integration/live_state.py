"""The state of a run in memory, for snapshots to go back to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from trainwright.integration import optimizers
from trainwright.integration.parts import Parts, Progress
from trainwright.integration.training_state import COUNTERS


@attrs.frozen(eq=False)
class LiveState:
    """All that a step changes on this rank, as a state that can be taken and put back.

    Not the data position and not the guards' memory, which `Recovery` keeps.

    Args:
        parts: whose weights, optimizer, loss scale, FP8 scales and generators.
        progress: whose counters.
    """

    parts: Parts
    progress: Progress

    def state_dict(self) -> dict[str, Any]:
        """Return the state; its tensors are the live ones."""
        parts = self.parts
        pieces = parts.model.pieces
        return {
            "weights": {name: piece.parameter.detach() for name, piece in pieces.items()},
            "optimizer": optimizers.snapshot(parts.optimizer),
            "float8": [state.state_dict() for state in parts.scales.states],
            "experts": parts.balance.state_dict(),
            "loss_scaler": parts.scaler.state_dict(),
            "own": {name: each.state_dict() for name, each in parts.own.items()},
            "generators": {name: each.get_state() for name, each in parts.generators.items()},
            "counters": {name: getattr(self.progress, name) for name in COUNTERS},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put a state back into the live tensors, and make the modules' weights equal to it."""
        parts = self.parts
        for name, piece in parts.model.pieces.items():
            piece.parameter.copy_(state["weights"][name])
        optimizers.put_back(parts.optimizer, state["optimizer"])
        parts.model.publish()
        for live, kept in zip(parts.scales.states, state["float8"], strict=True):
            live.load_state_dict(kept)
        parts.balance.load_state_dict(state["experts"])
        parts.scaler.load_state_dict(state["loss_scaler"])
        for name, each in parts.own.items():
            each.load_state_dict(state["own"][name])
        for name, generator in parts.generators.items():
            generator.set_state(state["generators"][name])
        for name, value in state["counters"].items():
            setattr(self.progress, name, value)
        parts.feed.count_from(self.progress.updates)
