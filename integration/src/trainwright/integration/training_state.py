"""The whole state of a run as a tree for the checkpoint store."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import torch

from trainwright.checkpointing import MismatchError, RankGenerators
from trainwright.checkpointing.state import Sharded, StateStore
from trainwright.integration import optimizers
from trainwright.integration.errors import ConfigError, RunFolderError
from trainwright.integration.parts import Parts, Progress
from trainwright.stability_guards import (
    AbandonedStateError,
    Intervention,
    Verdict,
    check_not_abandoned,
)

GENERATORS = "generators"
KIND = "kind"
"""Where a checkpoint says which optimizer's states it holds."""
ALWAYS_BEFORE = "AdamW"
"""What checkpoints that do not say it hold."""
COUNTERS = ("step", "updates", "skipped")


def save_state(
    store: StateStore,
    parts: Parts,
    progress: Progress,
    *,
    protect: Collection[int] = (),
    asynchronous: bool = False,
) -> None:
    """Save weights, moments, data position, guard and counters as checkpoint ``progress.step``.

    Args:
        store: where to.
        parts: whose state.
        progress: how far the run has come.
        protect: steps whose checkpoints stay, however few the store keeps.
        asynchronous: whether to return as soon as the state may change again.

    Raises:
        CheckpointingError: the state was not saved, or that of the save before this one; on every
            rank.
    """
    tree = state_tree(parts, progress)
    store.save(progress.step, tree, protect=protect, asynchronous=asynchronous)


def restore_state(store: StateStore, parts: Parts) -> Progress | None:
    """Load the newest checkpoint into ``parts``, whatever layout it was written by.

    One of training that a rollback has taken back since is passed over for an older one.

    Returns:
        How far the run had come; None where it was stopped before its first checkpoint, or where a
        rollback to its beginning has taken back what all of them hold.

    Raises:
        CheckpointingError: the checkpoint is damaged or does not fit the model, or all that are
            there are of other runs.
        AbandonedStateError: a rollback has taken back what all checkpoints hold, but not all that
            was trained before them.
        ConfigError: the checkpoint is of another optimizer.
        RunFolderError: the folder of the checkpoints cannot be read.

    Communicates: one broadcast of 8 bytes, and what `StateStore.load` does.
    """
    world = parts.mesh.world
    # One rank looks: two that look at different moments might see different things.
    nothing_saved = torch.zeros(1, dtype=torch.int64, device=world.device)
    if world.rank == 0:
        nothing_saved.fill_(int(_is_empty(store)))
    world.broadcast(nothing_saved, 0).wait()
    if nothing_saved.item():
        return None
    step = _newest_valid(store, parts)
    if step is None:
        return None
    tree = _load(store, parts, step)
    run = tree["run"]
    parts.model.publish()
    parts.feed.count_from(run["updates"])
    parts.feed.load_state_dict(tree["data"])
    parts.scales.restore(tree["float8"], run["step"])
    parts.balance.restore(tree["experts"])
    parts.scaler.load_state_dict(tree["loss_scaler"])
    for name, each in parts.own.items():
        each.load_state_dict(tree["own"][name])
    return Progress(**run, guard_state=_guards(tree))


def state_tree(parts: Parts, progress: Progress) -> dict[str, Any]:
    """Return the state as nested dicts; tensors are views of the live ones, but for generators."""
    materialise_states(parts, progress.updates)
    return {
        "model": {
            name: Sharded(piece.parameter.detach(), piece.spec)
            for name, piece in parts.model.pieces.items()
        },
        "optimizer": optimizers.tree(parts.optimizer),
        KIND: {"optimizer": parts.optimizer.name},
        "data": parts.feed.state_dict(),
        "run": {name: getattr(progress, name) for name in COUNTERS},
        # As text: what guards remember has other entries at each step.
        "guards": {"state": json.dumps(progress.guard_state)},
        "float8": parts.scales.tree(),
        "experts": parts.balance.tree(),
        "loss_scaler": parts.scaler.state_dict(),
        "own": {name: each.state_dict() for name, each in parts.own.items()},
        GENERATORS: _generators(parts).tree() if parts.generators else {},
    }


def materialise_states(parts: Parts, updates: int) -> None:
    """Give the optimizer the states that its first update would make, where these are known."""
    for each in optimizers.held(parts.optimizer).values():
        optimizers.materialise(each, updates)
        parts.optimizer.take_in(each.parameter)


def _newest_valid(store: StateStore, parts: Parts) -> int | None:
    """Return the step of the newest checkpoint that no rollback has taken back, looking only.

    None where a rollback has taken the run back to before the first one.
    """
    guards, step = _look(store)
    older = [other for other in store.steps() if other < step]
    while True:
        try:
            if guards:
                check_not_abandoned(guards, parts.journal.entries)
        except AbandonedStateError:
            if older:
                guards, step = _look(store, older.pop())
                continue
            if any(_restarts(entry) for entry in parts.journal.entries[guards["journalled"] :]):
                return None
            raise
        return step


def _restarts(entry: Intervention) -> bool:
    return entry.verdict is Verdict.ROLLBACK and entry.back_to == 0


def _look(store: StateStore, step: int | None = None) -> tuple[dict[str, Any], int]:
    report = store.load_partial({"guards": {"state": ""}}, step)
    return json.loads(report.tree["guards"]["state"] or "{}"), report.step


def _guards(tree: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(tree["guards"]["state"])
    return state


def _load(store: StateStore, parts: Parts, step: int) -> dict[str, Any]:
    has_kind, updates = _check_optimizer(store, parts, step)
    filling = optimizers.Filling(parts.optimizer, updates)
    target = {**state_tree(parts, Progress()), "optimizer": filling.tree}
    if not has_kind:
        del target[KIND]
    tree = _fill(store, parts, target, step)
    filling.finish()
    return tree


def _check_optimizer(store: StateStore, parts: Parts, step: int) -> tuple[bool, int]:
    """Return whether the checkpoint says whose states it holds, and after how many updates."""
    name = parts.optimizer.name
    # Before optimizers could be chosen there was one.
    asked = {KIND: {"optimizer": ALWAYS_BEFORE}, "run": {"updates": 0}}
    report = store.load_partial(asked, step)
    saved = report.tree[KIND]["optimizer"]
    if saved != name:
        raise ConfigError(
            f"the checkpoint of step {step} holds the states of {saved}, and this run has {name}, "
            f"which cannot go on from them; resume with {saved}, or begin a run of its own"
        )
    return f"{KIND}/optimizer" not in report.missing, report.tree["run"]["updates"]


def _fill(store: StateStore, parts: Parts, target: dict[str, Any], step: int) -> dict[str, Any]:
    if not parts.generators:
        return store.load(target, step)
    generators = _generators(parts)
    # Another layout has no use for the positions that are saved, and lacks its own.
    report = store.load_partial({**target, GENERATORS: generators.target()}, step)
    differing = [*report.missing, *report.unexpected]
    if any(not path.startswith(f"{GENERATORS}/") for path in differing):
        raise MismatchError(f"the checkpoint is not one of this model: {report}")
    generators.restore(report.tree[GENERATORS], report.step)
    return report.tree


def _generators(parts: Parts) -> RankGenerators:
    layout, seed = parts.config.parallel.layout, parts.config.seed
    return RankGenerators(parts.generators, parts.mesh.world, layout, seed=seed)


def _is_empty(store: StateStore) -> bool:
    try:
        return not store.runs() and all(
            left.endswith("interrupted, or under way") for left in store.leftovers()
        )
    except OSError as error:
        raise RunFolderError(f"cannot read {store.root}: {error}") from error
