"""The commands that look at checkpoints and convert them: ``trainwright checkpoint …``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainwright.checkpointing import CheckpointingError, NoCheckpointError
from trainwright.checkpointing.errors import UntrustedError
from trainwright.checkpointing.exchange import (
    LazyObject,
    LazyTensor,
    Source,
    import_source,
    open_dcp,
    open_huggingface,
    to_dcp,
    to_huggingface,
    to_store,
)
from trainwright.checkpointing.state.comparing import compare
from trainwright.checkpointing.state.inspection import (
    contents_of,
    describe,
    examine,
    open_place,
)
from trainwright.integration.checkpoint_text import (
    Opened,
    describe_foreign,
    finite,
    lines_of,
    lines_of_differences,
    size_text,
)
from trainwright.integration.errors import ConfigError

FORMATS = ("trainwright", "dcp", "safetensors")
_SIZES = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = re.compile(r"([0-9]{1,15})([KMG]i?B)?")
_WITH_STEP = re.compile(r"(.+)@([0-9]{1,18})")
_PLACE = (
    "a run folder, a folder of checkpoints, one checkpoint, a PyTorch DCP folder, or a folder of "
    "safetensors; with @STEP that step, else the newest"
)


def add_parser(commands: Any) -> None:
    """Add ``checkpoint`` and its four commands to the tool's parser."""
    text = "look at checkpoints, verify, compare and convert them"
    root = commands.add_parser("checkpoint", help=text, description=text, allow_abbrev=False)
    actions = root.add_subparsers(dest="action", required=True)
    show = _add(actions, "show", show_command, "what a checkpoint holds")
    show.add_argument("place", metavar="PLACE", help=_PLACE)
    show.add_argument("--json", action="store_true", help="print one JSON object")
    verify = _add(
        actions, "verify", verify_command, "read all of it and compare every checksum; 1 if damaged"
    )
    verify.add_argument("place", metavar="PLACE", help="as above; without @STEP all checkpoints")
    differ = _add(actions, "diff", diff_command, "how the second differs from the first; 1 if so")
    differ.add_argument("first", metavar="FIRST", help=_PLACE)
    differ.add_argument("second", metavar="SECOND", help="the same; @STEP alone: of FIRST's folder")
    convert = _add(actions, "convert", convert_command, "write a checkpoint in another format")
    convert.add_argument("place", metavar="PLACE", help=_PLACE)
    convert.add_argument("target", metavar="TARGET", help="a new folder")
    convert.add_argument(
        "--to",
        choices=FORMATS,
        required=True,
        help="trainwright: one checkpoint with all tensors in one file (needs memory for all of "
        "them); dcp: for torch.distributed.checkpoint.load; safetensors: the weights alone, as "
        "Hugging Face's libraries read them",
    )
    convert.add_argument(
        "--prefix",
        default="model/",
        help="what the paths of weights begin with here but not in safetensors (default model/)",
    )
    convert.add_argument(
        "--max-file-size", default="5GB", metavar="SIZE", help="of safetensors (default 5GB)"
    )
    convert.add_argument(
        "--step", type=int, help="the step of the new checkpoint (default: the one it has, or 0)"
    )
    for command in (show, verify, differ, convert):
        command.add_argument("--run", help="checkpoints of this run only")
        command.add_argument(
            "--follow-links",
            action="store_true",
            help="allow links to files elsewhere, of which the Hugging Face cache is made",
        )


def run(options: argparse.Namespace) -> int:
    """Run one of the commands; returns the exit code.

    Raises:
        ConfigError: There is no such checkpoint, it is damaged, or cannot be written as asked.
    """
    try:
        code: int = options.act(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (CheckpointingError, OSError) as error:
        raise ConfigError("; ".join(str(error).splitlines())) from error
    return code


def show_command(options: argparse.Namespace) -> int:
    """Print what a checkpoint holds."""
    with _open(options.place, options) as opened:
        if options.json:
            sys.stdout.write(json.dumps(finite(opened.described)) + "\n")
            return 0
        for line in lines_of(opened):
            sys.stdout.write(line + "\n")
    return 0


def verify_command(options: argparse.Namespace) -> int:
    """Read everything and print what is damaged; 1 if anything is."""
    place, step = _parse(options.place)
    kind = _kind(place)
    if kind != "trainwright":
        return _verify_foreign(kind, place, options)
    bad = 0
    for health in examine(place, step, options.run):
        state = "damaged" if health.problems else f"intact, {size_text(health.num_bytes)}"
        sys.stdout.write(f"{health.folder.name}: {state}\n")
        for problem in health.problems:
            sys.stdout.write(f"  {problem}\n")
        bad += bool(health.problems)
    return 1 if bad else 0


def diff_command(options: argparse.Namespace) -> int:
    """Print how two checkpoints differ; 1 if they do."""
    second = options.second
    if re.fullmatch(r"@[0-9]{1,18}", second):
        second = f"{_parse(options.first)[0]}{second}"
    with _open(options.first, options) as a, _open(second, options) as b:
        found = compare(a.contents, b.contents)
    for line in lines_of_differences(found):
        sys.stdout.write(line + "\n")
    if not found:
        sys.stdout.write("no difference\n")
    return 1 if found else 0


def convert_command(options: argparse.Namespace) -> int:
    """Write a checkpoint in another format."""
    limit = _parse_size(options.max_file_size)
    target = Path(options.target)
    if os.path.exists(target):
        raise ConfigError(f"{target} is there already; give the name of a new folder")
    with _open(options.place, options) as opened:
        for path, reason in opened.refused.items():
            sys.stderr.write(f"left out {path}: {reason}\n")
        for path in opened.changed:
            sys.stderr.write(f"{path}: tuples became lists\n")
        said = _convert(opened, target, limit, options)
    sys.stdout.write(f"{target}: {said}\n")
    return 0


def _convert(opened: Opened, target: Path, limit: int, options: argparse.Namespace) -> str:
    tensors = opened.contents.tensors
    if options.to == "dcp":
        to_dcp(opened.contents, target)
        return f"{len(tensors)} tensors and {len(opened.contents.plain)} values"
    if options.to == "safetensors":
        prefix = options.prefix
        written = to_huggingface(opened.contents, target, prefix=prefix, max_file_bytes=limit)
        rest = len(tensors) - len(written.weight_map) - len(written.tied)
        rest += len(opened.contents.plain)
        tied = "".join(f"; {name} is tied to {kept}" for name, kept in written.tied.items())
        return (
            f"{len(written.weight_map)} tensors, {size_text(written.total_size)}, in "
            f"{len(set(written.weight_map.values()))} files{tied}; {rest} other entries left out"
        )
    step = options.step if options.step is not None else opened.step or 0
    folder = to_store(opened.contents, target, step, run=options.run or opened.run)
    return f"step {step} in {folder.name}"


@contextlib.contextmanager
def _open(text: str, options: argparse.Namespace) -> Iterator[Opened]:
    place, step = _parse(text)
    kind = _kind(place)
    if kind == "trainwright":
        with open_place(place, step, options.run) as checkpoint:
            contents = contents_of(checkpoint)
            yield Opened(kind, contents, describe(checkpoint), checkpoint.step, checkpoint.run)
        return
    if step is not None:
        raise ConfigError(f"{place} is a {kind} folder, which has no steps; leave out @{step}")
    with _open_foreign(kind, place, options) as source:
        found = import_source(source, getattr(options, "prefix", "model/"))
        said = describe_foreign(kind, place, found)
        yield Opened(kind, found.contents, said, refused=found.refused, changed=found.changed)


def _open_foreign(kind: str, place: Path, options: argparse.Namespace) -> Source:
    if kind == "dcp":
        return open_dcp(place, follow_links=options.follow_links)
    return open_huggingface(place, follow_links=options.follow_links)


def _verify_foreign(kind: str, place: Path, options: argparse.Namespace) -> int:
    with _open_foreign(kind, place, options) as source:
        bad: list[str] = []
        entries: list[LazyTensor | LazyObject] = [*source.tensors.values()]
        entries += source.objects.values()
        for entry in entries:
            name = entry.name
            try:
                entry.read()
            except UntrustedError as error:  # whole, but not for us
                sys.stdout.write(f"  not compared: {name}: {error}\n")
            except CheckpointingError as error:
                bad.append(f"  {name}: {error}\n")
    note = "" if kind == "dcp" else " (the format has no checksums: sizes only)"
    sys.stdout.write(f"{place}: {'damaged' if bad else 'intact'}{note}\n")
    sys.stdout.writelines(bad)
    return 1 if bad else 0


def _kind(place: Path) -> str:
    """Return which format a folder has; the one of a folder that is not there is ours."""
    if os.path.exists(place / ".metadata"):
        return "dcp"
    names = os.listdir(place) if os.path.isdir(place) else []
    if "manifest.json" not in names and any(name.endswith(".safetensors") for name in names):
        return "safetensors"
    return "trainwright"


def _parse(text: str) -> tuple[Path, int | None]:
    match = None if os.path.exists(text) else _WITH_STEP.fullmatch(text)
    place, step = (Path(text), None) if match is None else (Path(match[1]), int(match[2]))
    if not os.path.isdir(place):
        raise NoCheckpointError(f"{place} is no folder")
    inner = place / "checkpoints"  # where a run keeps them
    return (inner if inner.is_dir() else place), step


def _parse_size(text: str) -> int:
    match = _SIZE.fullmatch(text)
    size = 0 if match is None else int(match[1]) * _SIZES[match[2] or ""]
    if size < 1:
        raise ConfigError(f"--max-file-size must be a size such as 500MB or 5GB, got {text!r}")
    return size


def _add(actions: Any, name: str, act: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=text, allow_abbrev=False
    )
    parser.set_defaults(act=act)
    return parser
