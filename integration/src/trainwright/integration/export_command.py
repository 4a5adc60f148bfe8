"""The command ``trainwright export``: a run's model as a folder of Hugging Face's libraries."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import attrs
import torch

from trainwright.collectives import Communicator
from trainwright.integration import hugging_face
from trainwright.integration.config import RunConfig
from trainwright.integration.data.learned import FILE, read_tokenizer
from trainwright.integration.errors import ConfigError
from trainwright.integration.loading import assemble_model
from trainwright.integration.looking import add_place, settings_for
from trainwright.integration.places import Place, open_place
from trainwright.integration.starting import run_on_ranks

WRITTEN = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
"""Dtypes that weights may be written in."""


@attrs.frozen
class Request:
    """What is asked for, as plain data that travels to other processes.

    Args:
        place: folder of the model.
        out: the new folder.
        leaves: of the settings.
        dtype: of the weights that are written; None for that of the master weights.
        step: of the checkpoint; None for the newest.
        max_file_bytes: bytes of tensors a file.
    """

    place: str
    out: str
    leaves: dict[str, Any]
    dtype: str | None = None
    step: int | None = None
    max_file_bytes: int = 5_000_000_000

    def run(self, world: Communicator) -> None:
        """Write this rank's part; the first one says what was written."""
        place = open_place(Path(self.place))
        shape = place.shape()
        parts = assemble_model(RunConfig.from_mapping(self.leaves), world, shape)
        loaded = place.load(parts, self.step)
        origin = place.origin()
        written = hugging_face.export(
            parts.model,
            shape,
            parts.mesh,
            self.out,
            dtype=None if self.dtype is None else WRITTEN[self.dtype],
            max_file_bytes=self.max_file_bytes,
            like=None if origin is None else hugging_face.read_config(origin).values,
            tokenizer=_tokenizer_folder(place),
        )
        if world.rank == 0:
            sys.stdout.write(
                f"{self.out}: {loaded}, {len(written.weight_map)} tensors in "
                f"{len(set(written.weight_map.values()))} files\n"
            )


def _tokenizer_folder(place: Place) -> Path:
    """Return the folder whose tokenizer is that of the model; the one with most files of it."""
    origin = place.origin()
    if origin is None or not (origin / FILE).is_file():
        return place.path
    theirs = read_tokenizer(origin).describe()
    return origin if theirs == place.tokenizer().describe() else place.path


def add_parser(commands: Any) -> None:
    """Add the command to the tool's parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "export",
        help="write a model as a folder that Hugging Face's transformers opens",
        description="Write config.json, safetensors and the tokenizer of a run's model.",
        allow_abbrev=False,
    )
    add_place(parser, computes=False)
    parser.add_argument("out", metavar="OUT", help="the new folder")
    parser.add_argument(
        "--save-dtype", choices=WRITTEN, help="of the weights (default: that of the run's masters)"
    )


def run(options: argparse.Namespace) -> int:
    """Export on as many ranks as the layout has.

    Raises:
        ConfigError: there is no model, it is of no family that is known, or the folder is there.
    """
    if os.path.exists(options.out):
        raise ConfigError(f"{options.out} is there already; give the name of a new folder")
    place = open_place(Path(options.model))
    request = Request(
        place=str(place.path),
        out=options.out,
        leaves=settings_for(place, options).leaves(),
        dtype=options.save_dtype,
        step=options.step,
    )
    return run_on_ranks(request, options.comm)
