"""The command line tool."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from trainwright.checkpointing import CheckpointingError
from trainwright.checkpointing.errors import (
    DamagedCheckpointError,
    LoadFailedError,
    MismatchError,
    NoCheckpointError,
    UntrustedError,
)
from trainwright.collectives import CollectiveError
from trainwright.integration import (
    checkpoint_command,
    data_command,
    estimate_command,
    evaluate_command,
    export_command,
    generate_command,
    report_command,
    train_command,
)
from trainwright.integration.errors import ConfigError, TrainwrightError
from trainwright.precision import LossScaleError
from trainwright.stability_guards import GuardError, HaltError

_ENDINGS = (
    "It exits with 0; with 1 where a run has failed, or what was compared or verified is not as it "
    "should be; with 2 where options, settings, data, weights or folders cannot be used; with 75 "
    "where a run was saved because a signal asked for its end; else with 128 + the number of the "
    "signal that stopped it."
)
_GIVEN = (DamagedCheckpointError, MismatchError, NoCheckpointError, UntrustedError, LoadFailedError)
"""What libraries raise of weights that were given."""

_TOLD = (CheckpointingError, CollectiveError, GuardError, HaltError, LossScaleError)


_MOST_WORDS = 5000
"""Of a command line: the time to parse one grows with the square of its words."""


class _Parser(argparse.ArgumentParser):
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str], namespace: Any = None
    ) -> tuple[Any, list[str]]:
        if len(args) > _MOST_WORDS:
            self.error(f"the command line has {len(args):,} words, at most {_MOST_WORDS:,}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit code.

    0, 1 for a failed run, 2 for input that cannot be used, weights among it, 75 for a run that was
    saved because a signal asked for its end, else 128 + its number for the signal that stopped it.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        # Generated text may hold characters that the terminal has not.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        options, unknown = parser().parse_known_args(given)
        if unknown:
            raise ConfigError(
                f"unrecognized arguments: {' '.join(unknown)}; "
                f"see trainwright {options.command} --help"
            )
        return _COMMANDS[options.command](options)
    except (TrainwrightError, *_GIVEN) as error:
        sys.stderr.write(f"trainwright: {error}\n")
        return 2
    except _TOLD as error:
        # What the libraries say of a run that cannot go on is meant for people; of a rank that
        # stops because another failed, the other one tells the story.
        sys.stderr.write(f"trainwright: {error}\n")
        return 1
    except OSError as error:
        # What a machine refuses is named with its file, wherever it was met.
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
        epilog=_ENDINGS,
        allow_abbrev=False,
    )
    commands = root.add_subparsers(dest="command", required=True, parser_class=_Parser)
    checkpoint_command.add_parser(commands)
    data_command.add_parser(commands)
    estimate_command.add_parser(commands)
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
    train_command.add_arguments(train)
    return root


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "checkpoint": checkpoint_command.run,
    "data": data_command.run,
    "estimate": estimate_command.run,
    "evaluate": evaluate_command.run,
    "export": export_command.run,
    "generate": generate_command.run,
    "report": report_command.run,
    "train": train_command.run,
}
