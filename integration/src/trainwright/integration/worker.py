"""What each rank does from start to finish."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from trainwright.checkpointing.state import Retention, StateStore
from trainwright.collectives import Communicator, ReduceOp
from trainwright.integration.config import RunConfig
from trainwright.integration.data import Corpus, fit_ngrams, read_corpus
from trainwright.integration.data.choice import default_source
from trainwright.integration.data.reader import evenly_spaced
from trainwright.integration.errors import ConfigError, DataError
from trainwright.integration.evaluation import evaluate
from trainwright.integration.generation import generate
from trainwright.integration.numerics import may_overflow
from trainwright.integration.observers import MetricsFile, display
from trainwright.integration.parts import Parts, Progress, assemble
from trainwright.integration.plot import plot_loss
from trainwright.integration.recipe import Observer, StepRecord, train
from trainwright.integration.recovering import describe_snapshots
from trainwright.integration.replica_check import ReplicaCheck
from trainwright.integration.run_folder import JOURNAL, WRITER, RunFolder
from trainwright.integration.saver import Saver
from trainwright.integration.training_state import restore_state
from trainwright.stability_guards import HaltError, Verdict, shared_journal

PROMPT = b"\ndef "
PATIENCE_S = 30.0
"""How long a run waits for the ranks of one whose starter was killed."""


@attrs.frozen
class Summary:
    """What a finished run has to say.

    Args:
        held_out_loss: nats a byte.
        bigram_loss, trigram_loss: of n-gram models of the training bytes, on the same sequences.
        sample: generated text.
    """

    steps: int
    updates: int
    skipped: int
    loss: float
    held_out_loss: float
    bigram_loss: float
    trigram_loss: float
    sample: str
    out: str


def run(world: Communicator, config: RunConfig, out: str, resume: bool) -> Summary:
    """Train on this rank and return the summary, the same on every rank.

    Args:
        world: all ranks of the run.
        config: the settings.
        out: the run folder; it has been created, or is resumed.
        resume: whether to continue from the newest checkpoint.
    """
    folder = RunFolder(Path(out))
    with contextlib.ExitStack() as held:
        if world.rank == 0:
            held.enter_context(folder.lock(WRITER, patience_s=PATIENCE_S))
        corpus = load_corpus(config)
        check_same_data(world, corpus)
        journal = shared_journal(folder.path / JOURNAL, world)
        parts = assemble(config, world, corpus, journal=journal)
        check_same_guards(world, parts)
        saver = _open(folder, parts, resume)
        # Left before the peers hear of an error: a save under way still needs them.
        held.enter_context(saver.store)
        last = _train(saver, folder)
        saver.finish()
        return _finish(parts, saver.progress, folder, corpus, last)


def check_same_data(world: Communicator, corpus: Corpus) -> None:
    """Check that all ranks have read the same.

    Raises:
        DataError: a rank has read something else; on every rank.

    Communicates: one all-reduce of 16 bytes.
    """
    if not _is_same(world, corpus.checksum):
        raise DataError(
            f"the ranks have read different data; rank {world.rank} read {corpus.files} files and "
            f"{len(corpus.train):,} bytes to train on from {corpus.source}"
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


def load_corpus(config: RunConfig) -> Corpus:
    """Read the data that the settings name."""
    try:
        if config.data.data is None:
            return read_corpus(default_source(), pattern="*.py")
        return read_corpus(Path(config.data.data))
    except OSError as error:
        raise DataError(f"cannot read the data: {error}") from error


def report(summary: Summary, as_json: bool) -> None:
    """Print the summary for a person, or as one JSON object."""
    if as_json:
        values = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in attrs.asdict(summary).items()
        }
        sys.stdout.write(json.dumps(values, allow_nan=False) + "\n")
        return
    below = "below" if summary.held_out_loss < summary.bigram_loss else "NOT below"
    sys.stdout.write(
        f"\nheld-out loss {summary.held_out_loss:.3f} nats a byte, {below} the byte bigram's "
        f"{summary.bigram_loss:.3f} (trigram {summary.trigram_loss:.3f})\n"
        f"updates {summary.updates}, skipped {summary.skipped}; run folder {summary.out}\n"
        f"sample:\n{summary.sample}\n"
    )


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
    if saved is not None and saved > config.steps:
        raise ConfigError(
            f"--steps {config.steps}: the run in {folder.path} has made {saved} steps already"
        )
    return Saver(store, parts, progress or parts.start(), saved)


def _train(saver: Saver, folder: RunFolder) -> list[StepRecord]:
    """Make the steps that are left; returns the last one's record, if there is one."""
    parts, progress = saver.parts, saver.progress
    first = parts.mesh.world.rank == 0
    last: list[StepRecord] = []
    with contextlib.ExitStack() as opened:
        observers: list[Observer] = [lambda record: last.__setitem__(slice(None), [record])]
        if first:
            sys.stderr.write(f"{describe_snapshots(parts, progress)}\n")
            folder.rewind(progress.step)
            observers.append(opened.enter_context(contextlib.closing(MetricsFile(folder.metrics))))
        show = opened.enter_context(display(first, parts.steps, progress.step))
        check = ReplicaCheck(parts, parts.guards.replicas_every)
        train(parts, progress, [*observers, check, saver, show])
    if last and last[0].verdict is not Verdict.CONTINUE and not _bears_skip(parts, last[0].loss):
        reason = parts.journal.entries[-1].reason
        raise HaltError(f"{reason}; the run ended on skipped steps, which are not saved")
    return last


def _bears_skip(parts: Parts, loss: float) -> bool:
    """Whether a skipped step has left a state worth keeping.

    Gradients of scaled losses may overflow in a healthy run; its weights stay as they were.
    """
    return may_overflow(parts.scaler) and math.isfinite(loss)


def _finish(
    parts: Parts, progress: Progress, folder: RunFolder, corpus: Corpus, last: list[StepRecord]
) -> Summary:
    config = parts.config
    tokens, labels = evenly_spaced(
        corpus.held_out, config.batch.sequence_length, config.evaluation.evaluate_sequences
    )
    held_out = evaluate(parts, tokens, labels)
    count = config.evaluation.sample_bytes
    sample = generate(parts, PROMPT, count) if count else b""
    levels = _baselines(parts.mesh.world, corpus, tokens, labels)
    if parts.mesh.world.rank == 0:
        lines: dict[str, Any] = {"held-out": held_out, "bigram": levels[0], "trigram": levels[1]}
        plot_loss(folder.plot, *folder.losses(), lines)
    return Summary(
        steps=progress.step,
        updates=progress.updates,
        skipped=progress.skipped,
        loss=last[0].loss if last else float("nan"),
        held_out_loss=held_out,
        bigram_loss=levels[0],
        trigram_loss=levels[1],
        sample=(PROMPT + sample).decode("utf-8", errors="replace"),
        out=str(folder.path),
    )


def _baselines(
    world: Communicator, corpus: Corpus, tokens: torch.Tensor, labels: torch.Tensor
) -> tuple[float, float]:
    # The first rank counts; the tables are large, and one copy a host is enough.
    losses = torch.zeros(2, dtype=torch.float64, device=world.device)
    if world.rank == 0:
        sequences = torch.cat((tokens[:, :1], labels), dim=1).numpy().astype(np.uint8)
        losses.copy_(torch.tensor(fit_ngrams(corpus.train).losses(sequences)))
    world.broadcast(losses, 0).wait()
    return float(losses[0]), float(losses[1])
