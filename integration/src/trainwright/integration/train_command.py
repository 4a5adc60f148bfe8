"""``trainwright train``: on ranks that are started here, that are given, or that are threads."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from torch.distributed.elastic.multiprocessing.errors import record

from trainwright.collectives import Communicator
from trainwright.integration import launch, worker
from trainwright.integration.config import RunConfig
from trainwright.integration.data import known_vocabulary
from trainwright.integration.endings import Ending
from trainwright.integration.errors import ConfigError
from trainwright.integration.finishing import Summary, report
from trainwright.integration.fitting import check_fits, fitting_guards
from trainwright.integration.going_on import way_on
from trainwright.integration.model import ModelShape
from trainwright.integration.offloading import check_folder
from trainwright.integration.preparing import prepare, prepared_by_first
from trainwright.integration.restarting import (
    StartOptions,
    add_start_options,
    fitted,
    run_with_restarts,
)
from trainwright.integration.settings.options import add_options
from trainwright.integration.settings.resolved import resolved
from trainwright.integration.settling import (
    TRANSPORTS,
    allow_other_data,
    continues,
    settle,
    to_standard_error,
    transport_of,
    worker_arguments,
)
from trainwright.integration.stopping import SIGNALS, STOPPED, Stop, Stopped, stop_on_signals
from trainwright.integration.values import counted
from trainwright.integration.vocabulary import shape_for

Begin = Callable[[Communicator, contextlib.ExitStack], tuple[str, bool]]
"""Says where the run is and whether it is continued, the same on every rank."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all options; those that are not given leave no trace in what is parsed."""
    add = parser.add_argument
    add("--config", metavar="FILE", help="settings in TOML, YAML or JSON; options go before it")
    add("--deepspeed", metavar="FILE", help="settings in DeepSpeed's JSON; options must agree")
    add("--drop-offload", action="store_true", help="leave out what that moves off the device")
    add("--print-config", action="store_true", help="print the settings as JSON, and train nothing")
    add("--out", help="run folder (default runs/DATE-TIME)")
    add("--resume", metavar="DIR", help="continue the run in this folder")
    add("--allow-other-data", action="store_true", help="resume with data that has changed")
    add("--comm", choices=TRANSPORTS, help="what carries messages (default auto: NCCL or Gloo)")
    add("--threads-as-ranks", action="store_true", help="every rank a thread: --comm threads")
    add("--prepared", action="store_true", default=False, help=argparse.SUPPRESS)
    add("--json", action="store_true", help="print the summary as one JSON object")
    add_start_options(parser.add_argument_group("starting").add_argument)
    add_options(parser)


def run(options: argparse.Namespace) -> int:
    """Check the settings, then train; returns the exit code."""
    place = launch.place_in_environment(os.environ)
    starting = StartOptions.of(options)
    is_first = place is None or place.rank == 0
    asked, out, resume = settle(
        options,
        to_standard_error if is_first else lambda note: None,
        decides=place is None or options.prepared,
    )
    config = asked
    if starting.elastic and place is not None:
        config = fitted(asked, place.world_size, exactly=True)
    _check(config)
    if getattr(options, "print_config", False):
        sys.stdout.write(config.text())
        sys.stderr.writelines(f"{line}\n" for line in resolved(config, _shape(config)))
        return 0
    if place is None:
        check_folder(config)
    if transport_of(options) == "threads":
        starting.check_started_elsewhere("threads")
        return _until_interrupted(_run_threads, config, out, resume, options)
    if place is None:
        return _until_interrupted(_start, config, out, resume, options)
    starting.check_started_elsewhere("torchrun or Slurm")
    if place.world_size != config.parallel.mesh.world_size:
        raise ConfigError(
            f"--layout {config.parallel.layout} needs "
            f"{counted(config.parallel.mesh.world_size, 'process', 'es')}, this run has "
            f"{place.world_size}; with --elastic dp follows them"
        )
    if options.prepared:
        # Ctrl-C reaches the launcher alone, which passes it on: a worker ends at once, also
        # where it waits inside a collective.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    launch.end_with_launcher()
    # What the folder keeps is what was asked for, whatever processes there are today.
    return _work_in_place(place, config, _meeting(asked, out, resume, options), options) or 0


def tell(result: Summary | Stopped, as_json: bool, *, first: bool = True) -> int:
    """Print how a run has ended, on the first rank; return the exit code."""
    if isinstance(result, Stopped):
        if first:
            sys.stderr.write(f"{result}\n")
        return STOPPED
    if first:
        report(result, as_json)
    return 0


def _check(config: RunConfig) -> None:
    shape = _shape(config)
    check_fits(shape, config)
    fitting_guards(shape, config)


def _shape(config: RunConfig) -> ModelShape:
    return shape_for(config, known_vocabulary(config.data.choice))


def _until_interrupted(
    start: Callable[[RunConfig, str, bool, argparse.Namespace], int],
    config: RunConfig,
    out: str,
    resume: bool,
    options: argparse.Namespace,
) -> int:
    """Do it; where a signal ends it, say how to go on."""
    try:
        code = start(config, out, resume, options)
    except KeyboardInterrupt:
        to_standard_error(f"stopped by SIGINT\n{way_on(out)}")
        return 128 + signal.SIGINT
    if code > 128:
        to_standard_error(way_on(out))
    return code


def _run_threads(config: RunConfig, out: str, resume: bool, options: argparse.Namespace) -> int:
    with contextlib.ExitStack() as held:
        held.enter_context(prepare(config, out, resume, allow_other_data(options)))
        stop = _stop(options, held)
        results = launch.run_as_threads(
            config.parallel.mesh.world_size,
            lambda world: worker.run(world, config, out, resume, stop),
            StartOptions.of(options).comm_timeout,
        )
    return tell(results[0], getattr(options, "json", False))


def _start(config: RunConfig, out: str, resume: bool, options: argparse.Namespace) -> int:
    """Start the ranks on this machine, again with those that are left where some are lost."""
    from trainwright.integration.cli import main  # which knows this module

    launch.check_startable(config.parallel.mesh.world_size)
    starting = StartOptions.of(options)
    more = ["--comm", transport_of(options), "--comm-timeout", str(starting.comm_timeout)]
    more += ["--save-on-signal"] if starting.save_on_signal else []
    as_json = getattr(options, "json", False)
    passed_on = SIGNALS if starting.save_on_signal else ()

    def start(current: RunConfig, again: bool) -> Ending:
        arguments = [*worker_arguments(current, out, resume or again, as_json), *more]
        return launch.run_workers(current.parallel.mesh.world_size, main, arguments, passed_on)

    with prepare(config, out, resume, allow_other_data(options)):
        return run_with_restarts(config, Path(out), start, starting, _check)


def _meeting(config: RunConfig, out: str, resume: bool, options: argparse.Namespace) -> Begin:
    """Return what finds the run folder once the ranks have met; the first one makes it."""
    if options.prepared:
        return lambda world, held: (out, resume)

    def begin() -> tuple[IO[str], bool]:
        continued = continues(options, out)
        return prepare(config, out, continued, allow_other_data(options)), continued

    return lambda world, held: prepared_by_first(world, begin, out, held)


@record
def _work_in_place(
    place: launch.ProcessPlace, config: RunConfig, begin: Begin, options: argparse.Namespace
) -> int:
    with contextlib.ExitStack() as held:
        stop = _stop(options, held)

        def work(world: Communicator) -> Summary | Stopped:
            out, resume = begin(world, held)
            return worker.run(world, config, out, resume, stop)

        timeout_s = StartOptions.of(options).comm_timeout
        result = launch.run_as_worker(place, work, transport_of(options), timeout_s)
    return tell(result, getattr(options, "json", False), first=place.rank == 0)


def _stop(options: argparse.Namespace, held: contextlib.ExitStack) -> Stop | None:
    return held.enter_context(stop_on_signals()) if hasattr(options, "save_on_signal") else None
