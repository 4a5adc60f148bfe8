"""The commands about data: ``trainwright data show RUN`` and ``trainwright data tokenize PATH``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import attrs

from trainwright.integration.config import RunConfig
from trainwright.integration.data import DataChoice, Dataset, Samples, open_data, prepare_data
from trainwright.integration.data.choice import FORMATS, HELD_OUT_SHARE
from trainwright.integration.data.manifest import MANIFEST
from trainwright.integration.data.packing import PADDING
from trainwright.integration.data.sources.nanogpt import TOKEN_DTYPES
from trainwright.integration.errors import ConfigError
from trainwright.integration.run_folder import DATA, JOURNAL, RunFolder
from trainwright.stability_guards import FileJournal, Intervention, JournalError


def add_parser(commands: Any) -> None:
    """Add ``data`` and its commands to the tool's parser."""
    text = "tokenise data once for many runs; look at the data that a run stumbled over"
    root = commands.add_parser("data", help=text, description=text, allow_abbrev=False)
    actions = root.add_subparsers(dest="action", required=True)
    what = "print the text of the batches at which a run intervened"
    show = actions.add_parser("show", help=what, description=what, allow_abbrev=False)
    show.set_defaults(act=show_command)
    show.add_argument("run", metavar="RUN", help="a run folder")
    show.add_argument("--step", type=int, help="only of this step, as metrics count them")
    show.add_argument("--json", action="store_true", help="print one JSON object a sequence")
    what = "write the tokens of text into a folder, which --data FOLDER of a run maps as it is"
    made = actions.add_parser("tokenize", help=what, description=what, allow_abbrev=False)
    made.set_defaults(act=tokenize_command)
    add = made.add_argument
    add("data", metavar="PATH", help="text files, JSON lines, Parquet or a saved data set")
    add("--out", required=True, metavar="FOLDER", help="where tokens and tokenizer go")
    add("--format", choices=FORMATS, default="auto", help="of the data (default auto)")
    add("--text-field", default="text", help="field or column that holds the text (default text)")
    add("--chat", action="store_true", help="rows hold messages, of which answers are learnt")
    add("--tokenizer", help="bytes, bpe:N, or a tokenizer.json or its folder (default bytes)")
    add("--end-token", help="name of the token behind each document")
    add("--held-out", metavar="PATH", help="what is held out (default: a share of the data)")
    add("--held-out-share", type=float, default=HELD_OUT_SHARE, help="that share; 0 for nothing")
    add("--token-dtype", choices=TOKEN_DTYPES, default="uint16", help="of nanoGPT's files")


def run(options: argparse.Namespace) -> int:
    """Run the command that was chosen."""
    code: int = options.act(options)
    return code


def tokenize_command(options: argparse.Namespace) -> int:
    """Tokenise data into a folder of its own.

    Raises:
        ConfigError: options contradict each other, or the folder holds something else.
        DataError: data is missing or of another format.
    """
    names = {field.name for field in attrs.fields(DataChoice)}
    choice = DataChoice(**{name: v for name, v in vars(options).items() if name in names})
    if len(choice.paths) > 1:
        raise ConfigError("data tokenize takes one path; a run mixes folders by their weights")
    folder = Path(options.out)
    is_new = not os.path.exists(folder) or (os.path.isdir(folder) and not any(folder.iterdir()))
    if not is_new and not (folder / MANIFEST).exists():
        raise ConfigError(f"--out {folder} holds something else; give a new name")
    data = prepare_data(choice, folder)
    sys.stdout.write(f"{data.describe()}\n{folder}: {data.tokenizer.vocabulary} kinds of tokens\n")
    return 0


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
    with tempfile.TemporaryDirectory() as aside:
        data = _data_of(folder, config, Path(aside))
        folder.check_data(data.checksum, data.source, allow_other=False)
        samples = data.samples(config.batch.sequence_length, config.seed)
        for entry in chosen:
            _show(entry, data, samples, as_json=options.json)
    return 0


def _data_of(folder: RunFolder, config: RunConfig, aside: Path) -> Dataset:
    if (folder.path / DATA / MANIFEST).exists():
        return open_data(folder.path / DATA)
    # A run begun before tokens were kept in its folder.
    return prepare_data(config.data.choice, aside)


def _show(entry: Intervention, data: Dataset, samples: Samples, *, as_json: bool) -> None:
    if not as_json:
        sys.stdout.write(
            f"step {entry.step + 1}: {entry.verdict.name}, {entry.reason}\n"
            f"batch {entry.batch}, left out {entry.left_out}\n"
        )
    for start, stop in entry.batch.spans:
        for position in range(start, stop):
            row = samples.sample(position)
            here = slice(None) if row.documents is None else row.documents != PADDING
            text = data.tokenizer.decode(row.tokens[here])
            if as_json:
                line = json.dumps({"step": entry.step + 1, "position": position, "text": text})
            else:
                line = f"--- position {position}\n{text}"
            sys.stdout.write(line + "\n")
