"""Everything that looks on while a run goes on, put together on each rank."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from trainwright.integration.aside import write_aside
from trainwright.integration.devices import device_of
from trainwright.integration.display import display
from trainwright.integration.evaluating import EvaluateEvery
from trainwright.integration.flops import Products, flops_per_token
from trainwright.integration.measuring import RankMeasures
from trainwright.integration.memory_kinds import peak_bytes
from trainwright.integration.parts import Parts, Progress
from trainwright.integration.recipe import Observer
from trainwright.integration.recovering import describe_snapshots
from trainwright.integration.run_folder import ABOUT, MEASURED, SUMMARY, TENSORBOARD, RunFolder
from trainwright.integration.strict_json import strict_json
from trainwright.integration.telling import (
    JsonLines,
    Pace,
    Telling,
    Watcher,
    metrics_file,
)
from trainwright.integration.tensorboard import tensorboard_events


@attrs.frozen(eq=False)
class Watch:
    """What looks on.

    Args:
        observers: to be called after each step, those that only look.
        telling: tells the files and the person; None on every rank but the first.
        folder: of the run.
    """

    observers: Sequence[Observer]
    telling: Telling | None
    folder: RunFolder

    def evaluated(self, step: int, loss: float, seconds: float | None = None) -> None:
        """Tell of an evaluation."""
        if self.telling is not None:
            self.telling.evaluated(step, loss, seconds)

    def ended(self, summary: Mapping[str, Any]) -> None:
        """Tell of the held-out loss that the run ended with, and keep its summary."""
        self.evaluated(summary["steps"], summary["held_out_loss"])
        if self.telling is not None:
            write_aside(self.folder.path / SUMMARY, strict_json(summary, indent=2) + "\n")


@contextmanager
def watching(
    parts: Parts, progress: Progress, folder: RunFolder, evaluate: Callable[[], float]
) -> Iterator[Watch]:
    """Look on until the block ends; every rank enters it together.

    Args:
        parts: of this rank.
        progress: how far the run has come.
        folder: of the run; the first rank writes to it.
        evaluate: returns the held-out loss; every rank calls it together.

    Raises:
        ConfigError: TensorBoard is asked for and missing.

    Communicates: what `RankMeasures` does.
    """
    with contextlib.ExitStack() as opened:
        telling = None
        write: Callable[[Mapping[str, Any]], None] = _nowhere
        if parts.mesh.world.rank == 0:
            told = (*_beginning(parts, progress), describe_snapshots(parts, progress))
            sys.stderr.writelines(f"{line}\n" for line in told)
            folder.rewind(progress.step)
            write_aside(folder.path / ABOUT, strict_json(about(parts), indent=2) + "\n")
            telling = Telling(
                _watchers(parts, progress, folder, opened),
                pace_of(parts),
                lambda: peak_bytes(parts.mesh.world.device),
                parts.journal,
            )
            if parts.config.watching.every(parts.steps):
                lines = JsonLines(folder.path / MEASURED)
                opened.callback(lines.close)
                write = lines.write
        watch = Watch([], telling, folder)
        every = parts.config.evaluation.evaluate_every
        held_out = EvaluateEvery(every, evaluate, watch.evaluated)
        measures = RankMeasures(parts, progress, write)
        opened.callback(measures.close)
        first = [] if telling is None else [telling]
        yield attrs.evolve(watch, observers=[*first, measures, held_out])


def _nowhere(row: Mapping[str, Any]) -> None:
    """Take what nobody writes."""


def _beginning(parts: Parts, progress: Progress) -> Iterator[str]:
    """Yield a line on what the run goes on from, if it is not random weights."""
    if progress.step:
        yield f"going on from the checkpoint of step {progress.step}"
        if progress.updates == parts.steps:
            yield f"all {parts.steps:,} updates are made already; a larger --steps makes more"
    elif parts.config.model.weights is not None:
        yield f"begins with the weights of {parts.config.model.weights}"


def _watchers(
    parts: Parts, progress: Progress, folder: RunFolder, opened: contextlib.ExitStack
) -> list[Watcher]:
    watchers: list[Watcher] = [opened.enter_context(metrics_file(folder.metrics))]
    if parts.config.watching.tensorboard:
        events = tensorboard_events(folder.path / TENSORBOARD, progress.step)
        watchers.append(opened.enter_context(events))
    watchers.append(opened.enter_context(display(progress.end(parts.steps), progress.step)))
    return watchers


def pace_of(parts: Parts) -> Pace:
    """Return what the FLOPs of a step follow from, and how many the devices could do."""
    world = parts.mesh.world
    peak = peak_of(world.device, parts.config.dtype)
    return Pace(products_of(parts), None if peak is None else peak * world.size)


def products_of(parts: Parts) -> Products:
    """Return what a token is multiplied with in the model that is trained."""
    return Products.of(next(iter(parts.model.stages.values())).shape)


def peak_of(device: torch.device, dtype: str) -> float | None:
    """Return the FLOP/s of one device; None where that is not known."""
    known = device_of(device)
    return None if known is None else known.peak(dtype)


def about(parts: Parts) -> dict[str, Any]:
    """Return what a run is, beside its settings, as plain data for its report."""
    config, device = parts.config, parts.mesh.world.device
    known, products = device_of(device), products_of(parts)
    name = device.type.upper() if device.type != "cuda" else torch.cuda.get_device_name(device)
    return {
        "model": config.model.model,
        "parameters": next(iter(parts.model.stages.values())).shape.num_parameters,
        "flops_per_token": flops_per_token(products, config.batch.sequence_length),
        "device": name if known is None else known.name,
        "peak_flops_per_s": peak_of(device, config.dtype),
        "world": parts.mesh.world.size,
        "layout": config.parallel.layout,
        "schedule": config.parallel.schedule,
        "pipeline_ranks": parts.mesh.size("pp"),
        "microbatches": config.sizes.microbatches,
        "chunks": config.parallel.chunks,
        "torch": torch.__version__,
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
