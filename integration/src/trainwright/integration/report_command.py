"""The command ``trainwright report``: a run folder as one page for the browser."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from trainwright.integration.aside import write_aside
from trainwright.integration.errors import RunFolderError
from trainwright.integration.report import page, read_run


def add_parser(commands: Any) -> None:
    """Add the command to the tool's parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "report",
        help="write a page of a run: curves, interventions, ranks, pipeline, settings",
        description="Write one HTML page that needs no network, also of a run under way.",
        allow_abbrev=False,
    )
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--out", help="the page (default report.html in that folder)")


def run(options: argparse.Namespace) -> int:
    """Write the page and say where it is.

    Raises:
        RunFolderError: there is no run, or the page cannot be written.
    """
    folder = Path(options.run)
    out = folder / "report.html" if options.out is None else Path(options.out)
    text = page(read_run(folder))
    try:
        write_aside(out, text)
    except OSError as error:
        raise RunFolderError(f"cannot write the report {out}: {error}") from error
    sys.stdout.write(f"{out}\n")
    return 0
