"""The whole state of a run as a tree for the checkpoint store."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from trainwright.checkpointing.state import Sharded, StateStore
from trainwright.integration.errors import RunFolderError
from trainwright.integration.parts import Parts, Progress

MOMENTS = ("exp_avg", "exp_avg_sq")


def save_state(store: StateStore, parts: Parts, progress: Progress) -> None:
    """Save weights, moments, data position, guard and counters as checkpoint ``progress.step``."""
    store.save(progress.step, state_tree(parts, progress))


def restore_state(store: StateStore, parts: Parts) -> Progress:
    """Load the newest checkpoint into ``parts``, whatever layout it was written by.

    Raises:
        RunFolderError: there is no complete checkpoint.
        CheckpointError: the checkpoint is damaged or does not fit the model.
    """
    if store.latest() is None:
        raise RunFolderError(f"{store.root} holds no complete checkpoint to resume from")
    tree = store.load(state_tree(parts, parts.start()))
    run = tree["run"]
    for piece in parts.model.pieces.values():
        parts.optimizer.state[piece.parameter]["step"].fill_(float(run["updates"]))
    parts.model.publish()
    parts.feed.load_state_dict(tree["data"])
    return Progress(**run)


def state_tree(parts: Parts, progress: Progress) -> dict[str, Any]:
    """Return the state as nested dicts; tensors are views of the live ones."""
    materialise_moments(parts)
    pieces = parts.model.pieces
    states = parts.optimizer.state
    return {
        "model": {
            name: Sharded(piece.parameter.detach(), piece.spec) for name, piece in pieces.items()
        },
        "optimizer": {
            name: {
                moment: Sharded(states[piece.parameter][moment], piece.spec) for moment in MOMENTS
            }
            for name, piece in pieces.items()
        },
        "data": parts.feed.state_dict(),
        "run": attrs.asdict(progress, recurse=False),
    }


def materialise_moments(parts: Parts) -> None:
    """Give AdamW the zero moments it would make at its first step, without a step."""
    for group in parts.optimizer.param_groups:
        for parameter in group["params"]:
            if not parts.optimizer.state[parameter]:
                parts.optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    **{moment: torch.zeros_like(parameter) for moment in MOMENTS},
                }
