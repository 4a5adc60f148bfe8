"""What can be said on the command line, and what it means."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from trainwright.pipeline_schedules.costs import Costs
from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.generators import GENERATORS

STANDARD_OUTPUT = "-"

_COST_NAMES = {
    "F": "forward",
    "I": "input_gradient",
    "W": "weight_gradient",
    "B": "backward",
    "pair": "pair",
    "latency": "latency",
    "bytes": "boundary_bytes",
    "bandwidth": "bandwidth",
    "gather": "gather",
    "reduce": "reduce",
}
_OUTPUTS = {
    "svg": "write a picture",
    "trace": "write a trace for Chrome and Perfetto",
    "csv": "write the table that PyTorch reads",
    "json": "write numbers and actions",
}
_COSTS_HELP = (
    "costs, such as F=1,I=1.1,W=0.9,latency=0.1; B of a whole backward (else I + W) and pair of an "
    "overlapped one (else F + B), bytes and bandwidth of transfers, gather and reduce of weights; "
    "one number for all stages, or one for each between colons: F=1:1.2:1"
)


class _OneLine(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"error: {message}; see {self.prog} --help\n")
        sys.exit(2)


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line; ends the process with code 2 and one line where it is wrong."""
    top = _OneLine(
        prog="python -m trainwright.pipeline_schedules",
        description="Show, compare and search pipeline schedules; tables are verified first.",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_show(commands.add_parser("show", help="draw a generated schedule, or one from a table"))
    _add_compare(commands.add_parser("compare", help="print one table of all generators"))
    _add_search(commands.add_parser("search", help="search for costs and a memory limit"))
    chosen = top.parse_args(words)
    if clash := _clash(chosen):
        top.error(clash)
    return chosen


def _clash(chosen: argparse.Namespace) -> str | None:
    """Why outputs cannot be written, if two go to one place."""
    places: dict[str, str] = {}
    for name in _OUTPUTS:
        place = getattr(chosen, name, None)
        if place in places:
            where = "standard output" if place == STANDARD_OUTPUT else place
            return f"--{places[place]} and --{name} both go to {where}; give each its own FILE"
        if place is not None:
            places[place] = name
    return None


def _add_show(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(GENERATORS)
    parser.add_argument("schedule", help=f"{names}; or a table of PyTorch's pipelining, NAME.csv")
    _add_sizes(parser, required=False)
    parser.add_argument("--chunks", type=int, help="chunks of the model on each rank")
    _add_costs(parser)
    _add_outputs(parser)


def _add_compare(parser: argparse.ArgumentParser) -> None:
    _add_sizes(parser, required=True)
    parser.add_argument("--chunks", type=int, default=2, help="of generators that loop (default 2)")
    _add_costs(parser)


def _add_search(parser: argparse.ArgumentParser) -> None:
    _add_sizes(parser, required=True)
    parser.add_argument(
        "--v-shape", action="store_true", help="two chunks a rank, placed as in ZB-V"
    )
    parser.add_argument(
        "--memory-limit", type=float, help="microbatches of a stage that a rank may hold"
    )
    parser.add_argument("--objective", choices=["makespan", "span"], default="makespan")
    _add_costs(parser)
    _add_outputs(parser)


def _add_sizes(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument(
        "--stages", type=int, required=required, help="stages of the pipeline, which are its ranks"
    )
    parser.add_argument(
        "--microbatches", type=int, required=required, help="microbatches of a step"
    )


def _add_costs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--costs", type=_costs, default=Costs(), help=_COSTS_HELP)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    for name, what in _OUTPUTS.items():
        parser.add_argument(
            f"--{name}",
            nargs="?",
            const=STANDARD_OUTPUT,
            metavar="FILE",
            help=f"{what} into FILE, or to standard output (one of them)",
        )
    parser.add_argument(
        "--lowered", action="store_true", help="with transfers and reductions, as it is executed"
    )


def _costs(text: str) -> Costs:
    values: dict[str, float | tuple[float, ...]] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if name.strip() not in _COST_NAMES:
            known = ", ".join(_COST_NAMES)
            raise argparse.ArgumentTypeError(f"{part!r} names no cost; known are {known}")
        field = _COST_NAMES[name.strip()]
        if field in values:
            raise argparse.ArgumentTypeError(f"{name.strip()} is given twice")
        try:
            numbers = tuple(float(one) for one in number.split(":"))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r} is no number, such as F=1") from None
        values[field] = numbers if len(numbers) > 1 else numbers[0]
    try:
        return Costs(**values)
    except ScheduleError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
