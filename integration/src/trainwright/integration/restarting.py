"""Going on with the ranks that are left, from the last checkpoint, when one was lost."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from trainwright.integration.config import RunConfig
from trainwright.integration.elastic import Workload, fit
from trainwright.integration.endings import Ending
from trainwright.integration.errors import ConfigError, TrainwrightError
from trainwright.integration.launch import TIMEOUT_S
from trainwright.integration.ramping import batch_ramp
from trainwright.integration.values import counted

RESTARTS = "restarts.jsonl"
"""File in the run folder with one JSON object a restart."""

_LONGEST_S = 86400.0

Start = Callable[[RunConfig, bool], Ending]
"""Runs all ranks of these settings to their end; whether they go on with the run in its folder."""


def _count(_: Any, field: attrs.Attribute[int], value: int) -> None:
    if value < 0:
        raise ConfigError(f"--{field.name.replace('_', '-')} must not be negative, got {value}")


def _seconds(_: Any, field: attrs.Attribute[float], value: float) -> None:
    if not 1 <= value <= _LONGEST_S:
        raise ConfigError(
            f"--{field.name.replace('_', '-')} must be from 1 second to a day ({_LONGEST_S:.0f}), "
            f"got {value:g}"
        )


@attrs.frozen
class StartOptions:
    """How ranks are started and started again; nothing of it changes what is computed.

    Args:
        elastic: go on with the run that the folder holds, if it does, with as many data ranks as
            there are processes.
        max_restarts: how often the ranks that are left go on after one was lost.
        min_ranks: fewer do not go on.
        save_on_signal: whether a signal lets the run save after its step, and end.
        comm_timeout: seconds that ranks wait for each other, to meet and in every operation: a rank
            that hangs, or a link that is cut, is found after so long.
    """

    elastic: bool = False
    max_restarts: int = attrs.field(default=0, validator=_count)
    min_ranks: int = attrs.field(default=1, validator=_count)
    save_on_signal: bool = False
    comm_timeout: float = attrs.field(default=TIMEOUT_S, validator=_seconds)

    @classmethod
    def of(cls, options: argparse.Namespace) -> StartOptions:
        """Return what was given on the command line.

        Raises:
            ConfigError: an option has no effect.
        """
        names = [field.name for field in attrs.fields(cls)]
        made = cls(**{name: value for name, value in vars(options).items() if name in names})
        if hasattr(options, "min_ranks") and not made.max_restarts:
            raise ConfigError("--min-ranks has no effect without --max-restarts")
        if made.elastic and not (hasattr(options, "out") or hasattr(options, "resume")):
            raise ConfigError(
                "--elastic goes on with the run in --out where there is one; give --out a name, "
                "for by default each start takes another"
            )
        return made

    def check_started_elsewhere(self, by: str) -> None:
        """Check that no option was given that only this machine's launcher of processes obeys.

        Raises:
            ConfigError: one was.
        """
        if self.max_restarts:
            raise ConfigError(
                f"--max-restarts has no effect where ranks are started by {by}: give torchrun its "
                "own --max-restarts and --nnodes MIN:MAX, and this command --elastic"
            )


def add_start_options(add: Callable[..., Any]) -> None:
    """Add the options of `StartOptions`; what is not given leaves no trace."""
    add(
        "--elastic",
        action="store_true",
        help="go on with the run in --out, if it holds one, with the processes that there are: dp "
        "and microbatches change, the global batch stays",
    )
    add(
        "--max-restarts",
        type=int,
        metavar="N",
        help="go on from the last checkpoint with the ranks that are left, so often (default 0)",
    )
    add("--min-ranks", type=int, metavar="N", help="but not with fewer ranks (default 1)")
    add(
        "--save-on-signal",
        action="store_true",
        help="on SIGTERM or SIGUSR1 save after the step and end with exit code 75",
    )
    add(
        "--comm-timeout",
        type=float,
        metavar="SECONDS",
        help="give up on a rank that has not come to an operation for so long (default "
        f"{TIMEOUT_S:.0f})",
    )


def fitted(config: RunConfig, ranks: int, *, exactly: bool, at_least: int = 1) -> RunConfig:
    """Return the settings of the same run on another number of ranks.

    Raises:
        ConfigError: none fit; the numbers of ranks that do are named.
    """
    sizes = config.sizes
    work = Workload(config.parallel.mesh, sizes.global_batch, sizes.microbatches)
    found = fit(work, ranks, exactly=exactly, at_least=at_least)
    if found == work:
        return config
    changed = config.evolve(
        layout=str(found.layout),
        global_batch=found.global_batch,
        micro_batch=found.rows,
        microbatches=found.microbatches,
    )
    if batch_ramp(changed).stages != batch_ramp(config).stages:
        raise ConfigError(
            f"--ramp-from {config.batch.ramp_from} grows by what data ranks can share out, which "
            f"changes with {ranks} ranks; give --ramp-by the sequences by which batches grow"
        )
    return changed


def run_with_restarts(
    config: RunConfig,
    folder: Path,
    start: Start,
    options: StartOptions,
    check: Callable[[RunConfig], None],
) -> int:
    """Run, and go on with the ranks that are left where some are lost; returns the exit code.

    What is lost of the training is what was done since the last checkpoint: those steps are made
    again, with the same batches. Settings that are given to one start fit its ranks; the folder
    keeps those of the first.

    Args:
        config: the settings of the first start.
        folder: of the run.
        start: starts the ranks and waits for them.
        options: how often, and with how few.
        check: that settings fit together.
    """
    current = config
    for restart in range(options.max_restarts + 1):
        ending = start(current, restart > 0)
        if ending.reason:
            sys.stderr.write(ending.reason + "\n")
        if not ending.lost or restart == options.max_restarts:
            return ending.code
        left = current.parallel.mesh.world_size - ending.lost
        try:
            current = fitted(config, left, exactly=False, at_least=options.min_ranks)
            check(current)
        except TrainwrightError as error:
            sys.stderr.write(f"trainwright: cannot go on: {error}\n")
            return ending.code
        _tell(folder, current, ending, restart + 1, options.max_restarts)
    raise AssertionError("the last start returns")


def _tell(folder: Path, config: RunConfig, ending: Ending, restart: int, most: int) -> None:
    layout, microbatches = config.parallel.layout, config.sizes.microbatches
    sys.stderr.write(
        f"restart {restart} of {most}: going on from the last checkpoint with --layout {layout} "
        f"and {counted(microbatches, 'microbatch', 'es')}\n"
    )
    row = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "reason": ending.reason,
        "layout": layout,
        "microbatches": microbatches,
    }
    with (folder / RESTARTS).open("a") as file:
        file.write(json.dumps(row) + "\n")
