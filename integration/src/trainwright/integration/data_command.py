"""The command that looks at the data of a run: ``trainwright data show RUN --step N``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from trainwright.integration import worker
from trainwright.integration.data import Reader
from trainwright.integration.errors import ConfigError
from trainwright.integration.run_folder import JOURNAL, RunFolder
from trainwright.stability_guards import FileJournal, Intervention, JournalError


def add_parser(commands: Any) -> None:
    """Add ``data`` and its command to the tool's parser."""
    text = "look at the data that a run stumbled over"
    root = commands.add_parser("data", help=text, description=text, allow_abbrev=False)
    actions = root.add_subparsers(dest="action", required=True)
    what = "print the text of the batches at which a run intervened"
    show = actions.add_parser("show", help=what, description=what, allow_abbrev=False)
    show.set_defaults(act=show_command)
    show.add_argument("run", metavar="RUN", help="a run folder")
    show.add_argument("--step", type=int, help="only of this step, as metrics count them")
    show.add_argument("--json", action="store_true", help="print one JSON object a sequence")


def run(options: argparse.Namespace) -> int:
    """Run the command that was chosen."""
    code: int = options.act(options)
    return code


def show_command(options: argparse.Namespace) -> int:
    """Print every sequence of the journalled batches, with its position.

    The positions are what ``--exclude FILE`` takes: a JSON list of them and of [start, stop].

    Raises:
        ConfigError: the journal cannot be read, or has nothing on the step.
        RunFolderError: the folder holds no run, or the data is not that of the run.
    """
    folder = RunFolder(Path(options.run))
    config = folder.config()
    try:
        entries = FileJournal(folder.path / JOURNAL).entries
    except (JournalError, OSError) as error:
        raise ConfigError(f"cannot read the journal of {options.run}: {error}") from error
    chosen = [e for e in entries if options.step is None or e.step + 1 == options.step]
    if not chosen:
        steps = sorted({entry.step + 1 for entry in entries})
        known = f"it intervened at steps {steps}" if steps else "it never intervened"
        raise ConfigError(f"the journal of {options.run} has nothing to show: {known}")
    corpus = worker.load_corpus(config)
    folder.check_data(corpus.checksum, corpus.source, allow_other=False)
    length, size = config.batch.sequence_length, config.sizes.global_batch
    reader = Reader(corpus.train, length, size, seed=config.seed)
    for entry in chosen:
        _show(entry, reader, as_json=options.json)
    return 0


def _show(entry: Intervention, reader: Reader, *, as_json: bool) -> None:
    if not as_json:
        sys.stdout.write(
            f"step {entry.step + 1}: {entry.verdict.name}, {entry.reason}\n"
            f"batch {entry.batch}, left out {entry.left_out}\n"
        )
    for start, stop in entry.batch.spans:
        for position in range(start, stop):
            text = reader.sample(position).tobytes().decode("utf-8", errors="replace")
            if as_json:
                line = json.dumps({"step": entry.step + 1, "position": position, "text": text})
            else:
                line = f"--- position {position}\n{text}"
            sys.stdout.write(line + "\n")
