"""What a run can be told, as factors with their values, and the settings of a row of them."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from tests.equivalence.communicators import COMMUNICATORS
from tests.equivalence.families import FAMILIES
from tests.serial import settings
from trainwright.integration.config import DTYPES, RunConfig
from trainwright.integration.errors import ConfigError
from trainwright.integration.fitting import check_fits
from trainwright.integration.model import ModelShape
from trainwright.integration.optimizers import OPTIMIZERS
from trainwright.integration.settings.parallel import (
    CONTEXTS,
    GATHERS,
    OFFLOADS,
    REDUCTIONS,
    SCHEDULES,
)

MOST_RANKS = 8
SEQUENCES = 24
"""Of a global batch, as nearly as data ranks and microbatches share it out."""

BUDGET = 3000
"""Elements of a position that a stage may keep: more than the least, less than all."""

Row = Mapping[str, str]
"""A value of each factor."""

FACTORS: dict[str, tuple[str, ...]] = {
    "dp": ("1", "2", "3", "4", "8"),
    "tp": ("1", "2", "3", "4", "8"),
    "pp": ("1", "2", "3", "4"),
    "cp": ("1", "2", "3", "4"),
    "ep": ("1", "2", "4"),
    "etp": ("tp", "1"),
    "sp": ("no", "yes"),
    "zero": ("0", "1", "2", "3"),
    "dp_shard": ("dp", "2"),
    "gather": GATHERS,
    "reduce": REDUCTIONS,
    "overlap": ("yes", "no"),
    "context": CONTEXTS,
    "schedule": ("1f1b", *(name for name in SCHEDULES if name != "1f1b")),
    "recompute": (
        "none",
        "full",
        "every-2",
        "sqrt",
        "selective",
        "budget",
        "none+cpu",
        "full+cpu",
        "none+bf16",
    ),
    "dtype": ("float64", *(name for name in DTYPES if name != "float64")),
    "communicator": tuple(COMMUNICATORS),
    "microbatches": ("1", "2", "3", "4"),
    "family": tuple(FAMILIES),
    "optimizer": tuple(OPTIMIZERS),
    "offload": (*OFFLOADS, "nvme"),
}
"""The first value of each is the plainest."""

NEEDED = ("dp", "tp", "pp", "cp", "ep", "etp", "zero", "family")
"""Factors whose plainest value is refused beside some values of others.

Those of all other factors, such as no recomputation, go with anything.
"""


def world_size(row: Row) -> int:
    """Return the number of ranks."""
    return int(row["dp"]) * int(row["tp"]) * int(row["pp"]) * int(row["cp"])


def layout_of(row: Row) -> str:
    """Return the layout as a command line has it."""
    sizes = {axis: row[axis] for axis in ("dp", "cp", "tp", "pp", "ep") if row[axis] != "1"}
    if row["dp_shard"] != "dp":
        sizes["dp_shard"] = row["dp_shard"]
    if row["etp"] != "tp":
        sizes["etp"] = row["etp"]
    return ",".join(f"{axis}={size}" for axis, size in sizes.items()) or "dp=1"


def config_of(row: Row) -> RunConfig:
    """Return the settings of a row.

    Raises:
        ConfigError: it is refused.
    """
    family = FAMILIES[row["family"]]
    shared = int(row["dp"]) * int(row["microbatches"])
    recompute, _, kept = row["recompute"].partition("+")
    if recompute == "budget":
        recompute = f"budget:{_budget(row, max(1, SEQUENCES // shared))}B"
    scaled: dict[str, object] = {"initial_scale": 2.0**10} if row["dtype"] == "float16" else {}
    return settings(
        layout=layout_of(row),
        model="tiny-moe" if family.experts else "tiny-tied" if family.tied else "tiny",
        zero=int(row["zero"]),
        gather=row["gather"],
        reduce=row["reduce"],
        overlap=row["overlap"] == "yes",
        sequence_parallel=row["sp"] == "yes",
        context=row["context"],
        schedule=row["schedule"],
        recompute=recompute,
        offload_activations="cpu" if kept == "cpu" else None,
        compress_activations=kept if kept == "bf16" else None,
        dtype=row["dtype"],
        microbatches=int(row["microbatches"]),
        global_batch=shared * max(1, SEQUENCES // shared),
        optimizer=row["optimizer"],
        offload="nvme:/tmp" if row["offload"] == "nvme" else row["offload"],
        **scaled,
    )


def _budget(row: Row, sequences: int) -> int:
    """Return bytes of a stage and microbatch."""
    positions = sequences * (17 // int(row["cp"]) + 1)
    size = {"float64": 8, "float32": 4}.get(row["dtype"], 2)
    return BUDGET * size * positions


def shape_of(row: Row, config: RunConfig) -> ModelShape:
    """Return the sizes of a row's model: at least a layer for each stage of its pipeline."""
    shape = FAMILIES[row["family"]]
    return attrs.evolve(shape, layers=max(shape.layers, config.parallel.num_stages))


def refusal(row: Row) -> str | None:
    """Return why there is no such run, in the words of what refuses it; None where there is."""
    if world_size(row) > MOST_RANKS:
        return f"{world_size(row)} ranks are more than the {MOST_RANKS} of this array"
    try:
        config = config_of(row)
        check_fits(shape_of(row, config), config)
    except ConfigError as error:
        return str(error)
    return None
