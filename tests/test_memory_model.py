"""What the memory model says is what ranks really allocate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.serial import text
from trainwright.collectives import Communicator, LocalWorld
from trainwright.integration.config import RunConfig
from trainwright.integration.errors import ConfigError
from trainwright.integration.estimate_model import states_of_rank
from trainwright.integration.fitting import check_fits
from trainwright.integration.model import ExpertShape, ModelShape
from trainwright.integration.model.latent_shape import LatentShape
from trainwright.integration.parts import Parts, assemble
from trainwright.integration.stepping import make_schedule
from trainwright.integration.training_state import materialise_states
from trainwright.sharding.expert import Routing

SHAPES = {
    "dense": ModelShape(width=24, layers=4, heads=6, kv_heads=6, mlp_width=50),
    "tied": ModelShape(width=24, layers=5, heads=6, kv_heads=3, mlp_width=33, tied=True),
    "gelu": ModelShape(
        width=24,
        layers=4,
        heads=4,
        kv_heads=4,
        mlp_width=96,
        norm="layer",
        positions="learned",
        max_positions=128,
        activation="gelu",
        gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tied=True,
    ),
    "grouped": ModelShape(
        width=16, layers=4, heads=8, kv_heads=2, mlp_width=40, qk_norm=True, head_features=6
    ),
    "experts": ModelShape(
        width=16,
        layers=4,
        heads=8,
        kv_heads=8,
        mlp_width=40,
        dense_layers=(0,),
        experts=ExpertShape(Routing(8, 2, biased=True), width=8, shared_width=16, shared_gate=True),
    ),
    "latent": ModelShape(
        width=16,
        layers=4,
        heads=8,
        kv_heads=8,
        mlp_width=40,
        latent=LatentShape(keys=12, plain=4, turned=2, values=6, queries=10),
        qkv_bias=True,
    ),
}
"""Sizes that ranks do not divide among them."""


def storages(tensors: Iterable[torch.Tensor | None]) -> dict[int, int]:
    found = [t.untyped_storage() for t in tensors if t is not None and not t.is_meta]
    return {storage._cdata: storage.nbytes() for storage in found}


def states(optimizer: Any) -> Iterable[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def allocated(parts: Parts) -> int:
    """Return the bytes of the storages that hold the model states of a rank, each once."""
    parallel = set(parts.model.parallel.values())
    buckets = [b for each in parallel for unit in each.units.values() for b in unit.buckets]
    buffers = [b for stage in parts.model.stages.values() for b in stage.buffers()]
    held = storages(
        [
            *(t for b in buckets for t in (b.weights.full, b.weights.kept, b.weights.masters)),
            *(t for b in buckets for t in (b.sums.full, b.sums.kept)),
            *buffers,
            *states(parts.optimizer),
        ]
    )
    return sum(held.values())


def states_of(comm: Communicator, config: RunConfig, shape: ModelShape) -> tuple[int, int]:
    """Return what a rank allocates and what the model says."""
    parts = assemble(config, comm, text(), shape)
    materialise_states(parts, 1)
    expected = states_of_rank(config, shape, make_schedule(config), comm.rank)
    return allocated(parts), expected.total


@st.composite
def runs(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Eight ranks in some layout, of some model, with some way to share states out."""
    name = draw(st.sampled_from(sorted(SHAPES)))
    sizes = draw(
        st.sampled_from(
            [
                (dp, cp, tp, pp)
                for dp in (1, 2, 4, 8)
                for cp in (1, 2)
                for tp in (1, 2, 3, 4, 8)
                for pp in (1, 2, 4)
                if 6 <= dp * cp * tp * pp <= 8
            ]
        )
    )
    layout = ",".join(f"{a}={s}" for a, s in zip(("dp", "cp", "tp", "pp"), sizes, strict=True))
    options: dict[str, Any] = {
        "zero": draw(st.sampled_from((0, 1, 2, 3))),
        "dtype": draw(st.sampled_from(("float32", "bfloat16", "float64"))),
        "optimizer": draw(st.sampled_from(("adamw", "sgd"))),
        "sequence_parallel": sizes[2] > 1 and draw(st.booleans()),
        "schedule": draw(st.sampled_from(("1f1b", "interleaved-1f1b", "zb-v"))),
        "micro_batch": 1,
        "microbatches": sizes[3],
        "sequence_length": 32,
    }
    if name == "experts":
        layout += f",ep={draw(st.sampled_from((1, 2, 4)))}"
        layout += f",etp={draw(st.sampled_from((1, sizes[2])))}"
    elif sizes[0] > 2 and options["zero"]:
        layout += f",dp_shard={draw(st.sampled_from((2, sizes[0])))}"
    if options["zero"] < 3:
        options["bucket_bytes"] = draw(st.sampled_from((None, 3000, 20_000)))
    return name, {"layout": layout, **options}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@given(run=runs())
def test_model_states_take_the_bytes_that_eight_ranks_allocate(
    zero: int, run: tuple[str, dict[str, Any]]
) -> None:
    name, options = run
    options = {**options, "zero": zero}
    if zero == 3:
        options.pop("bucket_bytes", None)
    if zero == 0 and "dp_shard" in options["layout"]:
        options["layout"] = options["layout"].partition(",dp_shard")[0]
    config = fitting(options, SHAPES[name])

    ranks = LocalWorld(config.parallel.mesh.world_size, timeout_s=60.0).run(
        states_of, config, SHAPES[name]
    )

    assert [found for found, _ in ranks] == [expected for _, expected in ranks]


def fitting(options: dict[str, Any], shape: ModelShape) -> RunConfig:
    """Return the settings; a drawn layout that is refused is no example."""
    try:
        config = RunConfig.of(**options)
        check_fits(shape, config)
        make_schedule(config)
    except (ConfigError, ValueError):
        assume(False)
    return config
