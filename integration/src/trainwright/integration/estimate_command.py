"""The command ``trainwright estimate``: what each rank of a run will hold, before it is started."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from trainwright.integration.aside import write_aside
from trainwright.integration.config import RunConfig
from trainwright.integration.data.preparation import known_vocabulary
from trainwright.integration.devices import Device, named_device
from trainwright.integration.errors import ConfigError
from trainwright.integration.estimate_report import (
    Change,
    Loaded,
    changes_that_fit,
    loaded_ranks,
)
from trainwright.integration.hugging_face.config import read_shape
from trainwright.integration.model import PRESETS, ModelShape
from trainwright.integration.settings.options import add_options
from trainwright.integration.settling import settle
from trainwright.integration.stepping import make_schedule
from trainwright.sharding.memory import memory_svg, memory_table

RESERVE = 0.1
"""Share of all tensors that fragmentation is given unless somebody says otherwise."""

GB = 1e9


def add_parser(commands: Any) -> None:
    """Add the command to the tool's parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "estimate",
        help="say what memory each rank of a run will take, without building it",
        description="Estimate the memory of a training run from its settings alone.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--device", default=None, help="what it has to fit, such as H100; cpu: this machine's kind")
    add("--memory", type=float, default=None, metavar="GB", help="of the device, if not as known")
    add("--reserve", type=float, default=RESERVE, help="share for fragmentation")
    add("--picture", default=None, metavar="FILE", help="write the table as an SVG picture")
    add("--json", action="store_true", default=False, help="print one JSON object")
    add("--config", metavar="FILE", help="settings in TOML, YAML or JSON; options go before it")
    add("--deepspeed", metavar="FILE", help="settings in DeepSpeed's JSON; options must agree")
    add_options(parser)


def run(options: argparse.Namespace) -> int:
    """Print the estimate; 1 where it does not fit the device that was named.

    Raises:
        ConfigError: settings do not fit each other, or hold what is not estimated.
    """
    if not 0.0 <= options.reserve < 1.0:
        raise ConfigError(f"--reserve must be from 0 to below 1, got {options.reserve}")
    device, limit = _device(options)
    config = settle(options, decides=False)[0]
    shape = shape_of(config)
    way = {"kind": "cpu" if options.device == "cpu" else "cuda", "reserve": options.reserve}
    ranks = loaded_ranks(config, shape, **way)
    most = max(each.memory.total for each in ranks)
    changes: list[Change] = []
    if limit is not None and most > limit:
        changes = changes_that_fit(config, shape, limit, **way)
    title = headline(config, shape)
    if options.picture is not None:
        named = {each.name: each.memory for each in ranks}
        picture = memory_svg(named, limit_bytes=None if limit is None else int(limit), title=title)
        _write(Path(options.picture), picture)
    if options.json:
        found = as_object(config, shape, ranks, device, limit, changes)
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        sys.stdout.write("\n".join([title, *lines_of(ranks, device, limit, changes)]) + "\n")
    return int(limit is not None and most > limit)


def shape_of(config: RunConfig) -> ModelShape:
    """Return the sizes of the model; a preset has the tokens of the tokenizer that is named.

    ``--model`` may also be a config.json itself.
    """
    name = config.model.model
    if name not in PRESETS and Path(name).is_file():
        return config.model.applied(read_shape(Path(name).parent))
    shape = config.model.shape
    if name in PRESETS and config.data.tokenizer is not None:
        return attrs.evolve(shape, vocabulary=known_vocabulary(config.data.choice))
    return shape


def headline(config: RunConfig, shape: ModelShape) -> str:
    """Return what is estimated, in a line."""
    sizes, parallel = config.sizes, config.parallel
    model = config.model.model
    name = model if model in PRESETS else Path(model).name
    told = [
        f"{name}: {shape.num_parameters / 1e9:.3g} billion parameters",
        f"{parallel.layout} ({parallel.mesh.world_size} ranks), zero {parallel.zero}",
        f"{config.dtype}, {config.optimizer.optimizer}",
        f"{sizes.microbatches} microbatches of {sizes.micro_batch} x "
        f"{config.batch.sequence_length} tokens, {parallel.schedule}",
        f"recompute {config.activations.recompute}",
    ]
    if parallel.offload != "none":
        told.append(f"offload {parallel.offload}")
    return "; ".join(told)


def lines_of(
    ranks: Sequence[Loaded], device: str | None, limit: float | None, changes: Sequence[Change]
) -> list[str]:
    """Return the table and what follows from it."""
    lines = [memory_table({each.name: each.memory for each in ranks})]
    if limit is None:
        return lines
    fullest = max(ranks, key=lambda each: each.memory.total)
    left = limit - fullest.memory.total
    said = f"{device} of {limit / GB:g} GB"
    if left >= 0:
        return [*lines, f"fits {said}: {left / GB:.2f} GB are left on the fullest rank"]
    lines.append(f"does not fit {said}: {-left / GB:.2f} GB too much on the fullest rank")
    for change in changes:
        result = (limit - change.most) / GB
        told = f"fits, {result:.2f} GB left" if result >= 0 else f"still {-result:.2f} GB too much"
        lines.append(f"  with {change}: {told}")
    return lines


def as_object(
    config: RunConfig,
    shape: ModelShape,
    ranks: Sequence[Loaded],
    device: str | None,
    limit: float | None,
    changes: Sequence[Change],
) -> dict[str, Any]:
    """Return the estimate as plain data, in bytes."""
    most = max(each.memory.total for each in ranks)
    return {
        "model": config.model.model,
        "parameters": shape.num_parameters,
        "layout": config.parallel.layout,
        "world_size": config.parallel.mesh.world_size,
        "stages": make_schedule(config).num_stages,
        "device": device,
        "device_bytes": None if limit is None else int(limit),
        "most": most,
        "fits": None if limit is None else most <= limit,
        "ranks": [
            {
                "pipeline_rank": each.place,
                "rank": each.rank,
                "layers": [[part.start, part.stop] for part in each.blocks],
                **{kind.replace(" ", "_"): held for kind, held in each.memory.by_kind.items()},
                "total": each.memory.total,
                "host": each.memory.host,
                "file": each.memory.file,
                "moment": each.memory.moment,
            }
            for each in ranks
        ],
        "changes": [{"settings": dict(each.leaves), "most": each.most} for each in changes],
    }


def _device(options: argparse.Namespace) -> tuple[str | None, float | None]:
    """Return the name of what has to be fitted and its bytes; None where nothing was said."""
    memory = options.memory
    if memory is not None and not 0 < memory < math.inf:
        raise ConfigError(f"--memory must be positive and finite, got {memory}")
    if options.device in (None, "cpu"):
        return options.device or "the device", None if memory is None else memory * GB
    found: Device = named_device(options.device)
    return found.name, (found.memory_gb if memory is None else memory) * GB


def _write(path: Path, text: str) -> None:
    try:
        write_aside(path, text)
    except OSError as error:
        raise ConfigError(f"--picture {path} cannot be written: {error}") from error
