"""The command line tool."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import IO, Any, NoReturn

from torch.distributed.elastic.multiprocessing.errors import record

from trainwright.checkpointing import CheckpointingError
from trainwright.collectives import CollectiveError, Communicator
from trainwright.integration import (
    checkpoint_command,
    data_command,
    evaluate_command,
    export_command,
    generate_command,
    launch,
    report_command,
    worker,
)
from trainwright.integration.config import RunConfig
from trainwright.integration.data import known_vocabulary
from trainwright.integration.errors import ConfigError, TrainwrightError
from trainwright.integration.finishing import Summary, report
from trainwright.integration.fitting import check_fits
from trainwright.integration.preparing import prepare, prepared_by_first
from trainwright.integration.settings.options import add_options
from trainwright.integration.settings.resolved import resolved
from trainwright.integration.settling import (
    TRANSPORTS,
    allow_other_data,
    settle,
    to_standard_error,
    transport_of,
    worker_arguments,
)
from trainwright.integration.vocabulary import shape_for
from trainwright.precision import LossScaleError
from trainwright.stability_guards import GuardError, HaltError

_TOLD = (CheckpointingError, CollectiveError, GuardError, HaltError, LossScaleError)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit code.

    0, 1 for a failed run, 2 for wrong input, 128 + its number for the signal that stopped it.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        # Generated text may hold characters that the terminal has not.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        options = parser().parse_args(given)
        return _COMMANDS[options.command](options)
    except TrainwrightError as error:
        sys.stderr.write(f"trainwright: {error}\n")
        return 2
    except _TOLD as error:
        # What the libraries say of a run that cannot go on is meant for people; of a rank that
        # stops because another failed, the other one tells the story.
        sys.stderr.write(f"trainwright: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("trainwright: interrupted\n")
        return 130


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    root = _Parser(
        prog="trainwright",
        description="3D-parallel training of language models.",
        allow_abbrev=False,
    )
    commands = root.add_subparsers(dest="command", required=True, parser_class=_Parser)
    checkpoint_command.add_parser(commands)
    data_command.add_parser(commands)
    evaluate_command.add_parser(commands)
    export_command.add_parser(commands)
    generate_command.add_parser(commands)
    report_command.add_parser(commands)
    train = commands.add_parser(
        "train",
        help="train a model on text",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_options(train.add_argument)
    add_options(train)
    return root


def _add_options(add: Callable[..., Any]) -> None:
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


def train_command(options: argparse.Namespace) -> int:
    """Check the settings, then train on ranks that are started, given, or threads."""
    place = launch.place_in_environment(os.environ)
    is_first = place is None or place.rank == 0
    config, out, resume = settle(options, to_standard_error if is_first else lambda note: None)
    mesh = config.parallel.mesh
    check_fits(shape_for(config, known_vocabulary(config.data.choice)), mesh, config)
    if getattr(options, "print_config", False):
        sys.stdout.write(config.text())
        sys.stderr.writelines(f"{line}\n" for line in resolved(config))
        return 0
    as_json = getattr(options, "json", False)
    transport = transport_of(options)
    if transport == "threads":
        with prepare(config, out, resume, allow_other_data(options)):
            summaries = launch.run_as_threads(
                mesh.world_size,
                lambda world: worker.run(world, config, out, resume),
            )
        report(summaries[0], as_json)
        return 0
    if place is None:
        launch.check_startable(mesh.world_size)
        arguments = [*worker_arguments(config, out, resume, as_json), "--comm", transport]
        with prepare(config, out, resume, allow_other_data(options)):
            return launch.start_workers(mesh.world_size, main, arguments)
    if place.world_size != mesh.world_size:
        raise ConfigError(
            f"--layout {config.parallel.layout} needs {mesh.world_size} processes, "
            f"this run has {place.world_size}"
        )
    if options.prepared:
        # Ctrl-C reaches the launcher alone, which passes it on: a worker ends at once, also
        # where it waits inside a collective. It ends with its launcher in any case.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        launch.end_with_launcher()
    _work_in_place(place, config, out, resume, options)
    return 0


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "checkpoint": checkpoint_command.run,
    "data": data_command.run,
    "evaluate": evaluate_command.run,
    "export": export_command.run,
    "generate": generate_command.run,
    "report": report_command.run,
    "train": train_command,
}


@record
def _work_in_place(
    place: launch.Place, config: RunConfig, out: str, resume: bool, options: argparse.Namespace
) -> None:
    def work(world: Communicator) -> Summary:
        if options.prepared:
            return worker.run(world, config, out, resume)
        with contextlib.ExitStack() as held:

            def begin() -> IO[str]:
                return prepare(config, out, resume, allow_other_data(options))

            agreed = prepared_by_first(world, begin, out, held)
            return worker.run(world, config, agreed, resume)

    summary = launch.run_as_worker(place, work, transport_of(options))
    if place.rank == 0:
        report(summary, getattr(options, "json", False))
