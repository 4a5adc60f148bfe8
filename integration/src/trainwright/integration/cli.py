"""The command line tool."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from torch.distributed.elastic.multiprocessing.errors import record

from trainwright.checkpointing import CheckpointingError
from trainwright.collectives import CollectiveError, Communicator
from trainwright.integration import (
    checkpoint_command,
    data_command,
    launch,
    report_command,
    worker,
)
from trainwright.integration.config import SCALED, RunConfig
from trainwright.integration.errors import ConfigError, TrainwrightError
from trainwright.integration.fitting import check_fits
from trainwright.integration.preparing import prepare, prepared_by_first
from trainwright.integration.run_folder import RunFolder
from trainwright.integration.settings.options import add_options, given_leaves, written
from trainwright.integration.values import option
from trainwright.precision import LossScaleError
from trainwright.stability_guards import GuardError, HaltError

_TOLD = (CheckpointingError, CollectiveError, GuardError, HaltError, LossScaleError)
TRANSPORTS = ("auto", "gloo", "shm", "threads")


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
    add("--out", help="run folder (default runs/DATE-TIME)")
    add("--resume", metavar="DIR", help="continue the run in this folder")
    add("--allow-other-data", action="store_true", help="resume with data that has changed")
    add("--comm", choices=TRANSPORTS, help="what carries messages (default auto: NCCL or Gloo)")
    add("--threads-as-ranks", action="store_true", help="every rank a thread: --comm threads")
    add("--prepared", action="store_true", default=False, help=argparse.SUPPRESS)
    add("--json", action="store_true", help="print the summary as one JSON object")


def train_command(options: argparse.Namespace) -> int:
    """Check the settings, then train on ranks that are started, given, or threads."""
    config, out, resume = settle(options)
    mesh = config.parallel.mesh
    check_fits(config.model.shape, mesh, config)
    place = launch.place_in_environment(os.environ)
    as_json = getattr(options, "json", False)
    transport = transport_of(options)
    if transport == "threads":
        with prepare(config, out, resume, allow_other_data(options)):
            summaries = launch.run_as_threads(
                mesh.world_size,
                lambda world: worker.run(world, config, out, resume),
            )
        worker.report(summaries[0], as_json)
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
    "report": report_command.run,
    "train": train_command,
}


def transport_of(options: argparse.Namespace) -> str:
    """Return what carries messages.

    Raises:
        ConfigError: two options contradict each other.
    """
    as_threads = getattr(options, "threads_as_ranks", False)
    chosen: str = getattr(options, "comm", "threads" if as_threads else "auto")
    if as_threads and chosen != "threads":
        raise ConfigError(f"--threads-as-ranks is --comm threads, got --comm {chosen} besides")
    return chosen


def settle(options: argparse.Namespace) -> tuple[RunConfig, str, bool]:
    """Return the settings, the run folder and whether a run is continued.

    Raises:
        ConfigError, RunFolderError: options contradict each other, or no run is there to resume.
    """
    given = given_leaves(options)
    resume = getattr(options, "resume", None)
    out = getattr(options, "out", None)
    if resume is None:
        return RunConfig.of(**given), out or f"runs/{time.strftime('%Y%m%d-%H%M%S')}", False
    if out is not None and Path(out).resolve() != Path(resume).resolve():
        raise ConfigError(f"--out {out} contradicts --resume {resume}; a resumed run stays there")
    stored = RunFolder(Path(resume)).config()
    before = stored.leaves()
    for name in ("seed", "sequence_length"):
        if name in given and given[name] != before[name]:
            raise ConfigError(
                f"{option(name)} {given[name]} differs from the run's {before[name]}; the position "
                "in the data would mean another place"
            )
    _check_same_scaling(stored.dtype, given.get("dtype", stored.dtype))
    return stored.evolve(**given), resume, True


def _check_same_scaling(stored: str, wanted: str) -> None:
    if stored != wanted and {stored, wanted} & set(SCALED):
        raise ConfigError(
            f"--dtype {wanted} differs from the run's {stored}: checkpoints of {', '.join(SCALED)} "
            "hold scales that others lack; any change among the other dtypes works"
        )


def worker_arguments(config: RunConfig, out: str, resume: bool, as_json: bool) -> list[str]:
    """Return the command line with which each worker runs what was settled here."""
    arguments = ["train", "--prepared", "--resume" if resume else "--out", out, *written(config)]
    return [*arguments, "--json"] if as_json else arguments


def allow_other_data(options: argparse.Namespace) -> bool:
    """Whether a run may be continued with data that has changed.

    Raises:
        ConfigError: no run is continued.
    """
    allowed = getattr(options, "allow_other_data", False)
    if allowed and not hasattr(options, "resume"):
        raise ConfigError("--allow-other-data has no effect without --resume")
    return bool(allowed)


@record
def _work_in_place(
    place: launch.Place, config: RunConfig, out: str, resume: bool, options: argparse.Namespace
) -> None:
    def work(world: Communicator) -> worker.Summary:
        if options.prepared:
            return worker.run(world, config, out, resume)
        with contextlib.ExitStack() as held:

            def begin() -> IO[str]:
                return prepare(config, out, resume, allow_other_data(options))

            agreed = prepared_by_first(world, begin, out, held)
            return worker.run(world, config, agreed, resume)

    summary = launch.run_as_worker(place, work, transport_of(options))
    if place.rank == 0:
        worker.report(summary, getattr(options, "json", False))
