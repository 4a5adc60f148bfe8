"""What each rank does from start to finish."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections import deque
from pathlib import Path

import attrs
import torch

from trainwright.checkpointing.state import Retention, StateStore
from trainwright.collectives import Communicator, ReduceOp
from trainwright.integration.config import RunConfig
from trainwright.integration.data import Data, open_data
from trainwright.integration.errors import ConfigError, DataError
from trainwright.integration.evaluation import evaluate, held_out_rows
from trainwright.integration.finishing import Summary, finish
from trainwright.integration.health import pulse, warnings_of
from trainwright.integration.numerics import may_overflow
from trainwright.integration.parts import Parts, assemble
from trainwright.integration.recipe import Observer, StepRecord, train
from trainwright.integration.replica_check import ReplicaCheck
from trainwright.integration.run_folder import DATA, JOURNAL, WRITER, RunFolder
from trainwright.integration.saver import Saver
from trainwright.integration.stopping import Stop, Stopped
from trainwright.integration.training_state import restore_state
from trainwright.integration.watching import Watch, watching
from trainwright.stability_guards import Verdict, shared_journal

PATIENCE_S = 30.0
"""How long a run waits for the ranks of one whose starter was killed."""


def run(
    world: Communicator, config: RunConfig, out: str, resume: bool, stop: Stop | None = None
) -> Summary | Stopped:
    """Train on this rank and return the summary, the same on every rank.

    Args:
        world: all ranks of the run.
        config: the settings.
        out: the run folder; it has been created, or is resumed.
        resume: whether to continue from the newest checkpoint.
        stop: what may end the run early, saved and with nothing more to say.
    """
    folder = RunFolder(Path(out))
    with contextlib.ExitStack() as held:
        if world.rank == 0:
            held.enter_context(folder.lock(WRITER, patience_s=PATIENCE_S))
        data = open_data(folder.path / DATA)
        check_same_data(world, data)
        journal = shared_journal(folder.path / JOURNAL, world)
        parts = assemble(config, world, data, journal=journal, stop=stop)
        held.callback(parts.feed.close)
        check_same_guards(world, parts)
        saver = _open(folder, parts, resume)
        # Left before the peers hear of an error: a save under way still needs them.
        held.enter_context(saver.store)
        rows = held_out_rows(parts, data)

        def measure() -> float:
            return evaluate(parts, rows.tokens_NS, rows.labels_NS, rows.documents_NS)

        watch = held.enter_context(watching(parts, saver.progress, folder, measure))
        last = _train(saver, watch)
        if parts.stop.agreed and saver.progress.updates < parts.steps:
            return _end_early(saver, folder, last)
        saver.finish()
        summary = finish(parts, saver.progress, folder, data, rows, last)
        watch.ended(attrs.asdict(summary))
        return summary


def check_same_data(world: Communicator, data: Data) -> None:
    """Check that all ranks have read the same.

    Raises:
        DataError: a rank has read something else; on every rank.

    Communicates: one all-reduce of 16 bytes.
    """
    if not _is_same(world, data.checksum):
        raise DataError(
            f"the ranks have read different data; rank {world.rank} read {data.describe()}"
        )


def check_same_guards(world: Communicator, parts: Parts) -> None:
    """Check that all ranks have the same guards and leave the same positions out.

    Raises:
        ConfigError: the files that say so differ between hosts; on every rank.

    Communicates: one all-reduce of 16 bytes.
    """
    given = parts.config.guards
    if not _is_same(world, hashlib.sha256(repr(parts.guards).encode()).hexdigest()):
        raise ConfigError(
            f"--guards {given.guards} and --exclude {given.exclude} are not the same "
            "on all ranks, which would part ways; give every host the same files"
        )


def _is_same(world: Communicator, checksum: str) -> bool:
    """Whether all ranks have this hexadecimal checksum; the same answer on every rank."""
    mine = int(checksum[:15], 16)
    extremes = torch.tensor([mine, -mine], device=world.device)
    world.all_reduce(extremes, ReduceOp.MIN).wait()
    least, negated_greatest = extremes.tolist()
    return bool(least == -negated_greatest)


def _open(folder: RunFolder, parts: Parts, resume: bool) -> Saver:
    """Begin, or continue, the run that the folder names, and no other's checkpoints there."""
    config, keep = parts.config, None
    if config.saving.keep is not None:
        keep = Retention(config.saving.keep, config.saving.keep_every)
    store = StateStore(
        folder.checkpoints,
        parts.mesh.world,
        coordinates=parts.mesh.coordinates,
        keep=keep,
        run=folder.identity().run,
    )
    progress = restore_state(store, parts) if resume else None
    saved = None if progress is None else progress.step
    if progress is not None and progress.updates > config.steps:
        raise ConfigError(
            f"--steps {config.steps}: the run in {folder.path} has made {progress.updates} updates "
            "already"
        )
    return Saver(store, parts, progress or parts.start(), saved)


def _train(saver: Saver, watch: Watch) -> StepRecord | None:
    """Make the steps that are left; returns the last one's record, if there is one."""
    parts = saver.parts
    last: deque[StepRecord] = deque(maxlen=1)
    check = ReplicaCheck(parts, parts.guards.replicas_every)
    looking: list[Observer] = [last.append, *watch.observers, check, *warnings_of(parts)]
    with pulse(parts.mesh.world.rank) as beat:
        train(parts, saver.progress, [*looking, beat, saver])
    return last[0] if last else None


def _is_sound(parts: Parts, last: StepRecord | None) -> bool:
    """Whether the last step has left a state worth keeping.

    Gradients of scaled losses may overflow in a healthy run; its weights stay as they were.
    """
    if last is None or last.verdict is Verdict.CONTINUE:
        return True
    return may_overflow(parts.scaler) and math.isfinite(last.loss)


def _end_early(saver: Saver, folder: RunFolder, last: StepRecord | None) -> Stopped:
    if _is_sound(saver.parts, last):
        saver.finish()
    else:  # the checkpoint before it is the one to go on from
        saver.store.close()
    return Stopped(saver.progress.step, saver.saved, str(folder.path))
