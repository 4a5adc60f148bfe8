"""What the memory model says is what ranks really allocate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from tests.live_storages import LiveStorages
from tests.serial import text
from tools.bench import estimates
from tools.bench.offload import bounds
from tools.bench.offload.measure import Sizes
from trainwright.collectives import Communicator, LocalWorld
from trainwright.integration.config import RunConfig
from trainwright.integration.errors import ConfigError
from trainwright.integration.estimate_memory import memory_of_rank
from trainwright.integration.estimate_model import states_of_rank
from trainwright.integration.fitting import check_fits
from trainwright.integration.memory_kinds import state_bytes
from trainwright.integration.model import ExpertShape, ModelShape
from trainwright.integration.model.latent_shape import LatentShape
from trainwright.integration.parts import Parts, assemble
from trainwright.integration.recipe import StepRecord, train
from trainwright.integration.stepping import make_schedule
from trainwright.integration.training_state import materialise_states
from trainwright.sharding.expert import Routing
from trainwright.sharding.memory import RankMemory

README = Path(__file__).parent.parent / "README.md"

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
def runs(draw: st.DrawFn, zero: int) -> tuple[str, dict[str, Any]]:
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
        "zero": zero,
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
    elif sizes[0] > 2 and zero:
        layout += f",dp_shard={draw(st.sampled_from((2, sizes[0])))}"
    if zero < 3:
        options["bucket_bytes"] = draw(st.sampled_from((None, 3000, 20_000)))
    return name, {"layout": layout, **options}


def check_states(run: tuple[str, dict[str, Any]]) -> None:
    name, options = run
    config = fitting(options, SHAPES[name])

    ranks = LocalWorld(config.parallel.mesh.world_size, timeout_s=60.0).run(
        states_of, config, SHAPES[name]
    )

    assert [found for found, _ in ranks] == [expected for _, expected in ranks]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@settings(max_examples=3)
@given(data=st.data())
def test_model_states_take_the_bytes_that_eight_ranks_allocate(
    zero: int, data: st.DataObject
) -> None:
    check_states(data.draw(runs(zero)))


@pytest.mark.long
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@settings(max_examples=60)
@given(data=st.data())
def test_model_states_take_the_bytes_that_ranks_allocate_in_many_layouts(
    zero: int, data: st.DataObject
) -> None:
    check_states(data.draw(runs(zero)))


def offloaded(comm: Communicator, config: RunConfig, shape: ModelShape) -> tuple[int, ...]:
    """Return what ledgers count on device and host, what the model says, and room for padding."""
    parts = assemble(config, comm, text(), shape)
    materialise_states(parts, 1)
    away = parts.model.offload
    assert away is not None
    expected = states_of_rank(config, shape, make_schedule(config), comm.rank)
    on_device = expected.total - expected.buffer_bytes
    kept = sum(bucket.elsewhere.kept for bucket in expected.all_buckets)
    states = 2 * sum(bucket.pieces for bucket in expected.all_buckets)
    found = away.device.held_bytes, away.states.ledger.held_bytes
    return (*found, on_device, kept, states * BYTES_OF_ALIGNMENT)


BYTES_OF_ALIGNMENT = 64


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@settings(max_examples=2)
@given(data=st.data())
def test_offloaded_states_take_the_bytes_that_device_and_host_count(
    zero: int, data: st.DataObject
) -> None:
    name, options = data.draw(runs(zero))
    options["optimizer"] = "adamw"
    options["offload"] = "optimizer"
    if zero == 3:
        options["offload"] = data.draw(st.sampled_from(["optimizer", "parameters"]))
    config = fitting(options, SHAPES[name])

    world = LocalWorld(config.parallel.mesh.world_size, timeout_s=60.0)
    for device, host, on_device, kept, room in world.run(offloaded, config, SHAPES[name]):
        assert device == on_device
        assert kept <= host <= kept + room


def reported(comm: Communicator, config: RunConfig, shape: ModelShape) -> tuple[int, int]:
    """Return what a rank tells of its states before an update, and what the model says."""
    parts = assemble(config, comm, text(), shape)
    found: list[int] = []

    def count(*_: object) -> None:
        model = parts.model
        held = state_bytes(
            model.stages.values(),
            model.pieces,
            parts.optimizer,
            parallel=model.parallel.values(),
        )
        found.append(sum(held.values()))

    materialise_states(parts, 1)
    parts.optimizer.register_step_pre_hook(count)
    train(parts, parts.start(), [])
    # While its weight is released a parameter is one number.
    stages = parts.model.stages.values() if config.parallel.zero == 3 else ()
    stand_ins = sum(p.element_size() for stage in stages for p in stage.parameters())
    expected = states_of_rank(config, shape, make_schedule(config), comm.rank)
    return found[0], expected.total + stand_ins


@pytest.mark.parametrize("zero", [0, 3])
def test_what_a_rank_reports_of_its_states_is_all_that_it_holds(zero: int) -> None:
    config = RunConfig.of(layout="dp=2", zero=zero, dtype="bfloat16", steps=1, guards="none")
    shape = attrs.evolve(SHAPES["dense"], width=48)

    for found, expected in LocalWorld(2, timeout_s=60.0).run(reported, config, shape):
        assert found == expected


class _SeenEnoughError(Exception):
    pass


def peak_of(comm: Communicator, config: RunConfig, shape: ModelShape) -> tuple[int, RankMemory]:
    """Return the most that lives in a rank's step, all before it done, and what the model says."""
    peaks: list[int] = []
    # A file's third buffer is there from the second update on.
    seen = 3 if config.parallel.offload.startswith("nvme") else 2

    def look(record: StepRecord) -> None:
        peaks.append(live.peak_bytes)
        live.reset_peak()
        if record.step == seen:
            raise _SeenEnoughError

    with LiveStorages() as live, contextlib.suppress(_SeenEnoughError):
        parts = assemble(config, comm, text(), shape)
        train(parts, parts.start(), [look])
    # Ranks that are threads have reduced a unit before the next one is written.
    expected = memory_of_rank(config, shape, comm.rank, kind="cpu", live_reductions=1)
    return peaks[-1], expected


def check_peak(options: dict[str, Any], shape: ModelShape | None = None) -> None:
    # Guards keep copies of weights at times, which are not the step's.
    config = RunConfig.of(**{"global_batch": 8, "guards": "none", **options})
    shape = shape or config.model.shape

    ranks = LocalWorld(config.parallel.mesh.world_size, timeout_s=60.0).run(peak_of, config, shape)

    for found, expected in ranks:
        # Here device and host are one memory.
        assert expected.allocated + expected.host == pytest.approx(found, rel=0.05), expected


PEAKS: list[dict[str, Any]] = [
    {"layout": "dp=2", "microbatches": 2, "zero": 3, "recompute": "every-2", "dtype": "bfloat16"},
    {"layout": "tp=2,pp=2", "microbatches": 2, "sequence_parallel": True, "model": "tiny-tied"},
    {"layout": "pp=2", "microbatches": 2, "schedule": "zb-h1", "model": "tiny-moe"},
    {"layout": "dp=2", "microbatches": 2, "zero": 3, "offload": "nvme", "dtype": "bfloat16"},
]
MORE_PEAKS: list[dict[str, Any]] = [
    {"layout": "dp=2,pp=2", "microbatches": 4, "zero": 3, "dtype": "bfloat16"},
    {"layout": "dp=2", "microbatches": 2, "zero": 2, "reduce": "microbatch"},
    {"layout": "pp=2", "microbatches": 4, "schedule": "zb-v", "recompute": "full"},
    {"layout": "dp=1", "microbatches": 2, "dtype": "float64"},
    {"layout": "dp=2", "microbatches": 2, "zero": 1, "offload": "optimizer"},
    {"layout": "dp=2", "microbatches": 1, "zero": 2, "offload": "nvme", "dtype": "bfloat16"},
    {"layout": "dp=2,pp=2", "microbatches": 2, "zero": 3, "offload": "parameters"},
    {"layout": "dp=1", "microbatches": 2, "zero": 3, "offload": "parameters"},
    {"layout": "tp=2", "microbatches": 2, "offload": "optimizer", "dtype": "bfloat16"},
    {"layout": "dp=1", "microbatches": 2, "qk_norm": True},
    {"layout": "dp=2", "microbatches": 1, "zero": 3},
    {"layout": "pp=2", "microbatches": 4, "recompute": "selective"},
    {"layout": "dp=2", "microbatches": 2, "recompute": "selective", "dtype": "bfloat16"},
    {"layout": "tp=2,pp=2", "microbatches": 4, "recompute": "selective", "sequence_parallel": True},
    {"layout": "tp=2", "microbatches": 2, "recompute": "selective"},
    {"layout": "pp=2", "microbatches": 4, "recompute": "selective", "model": "tiny-moe"},
    {"layout": "dp=2", "microbatches": 2, "zero": 1, "reduce_dtype": "bfloat16"},
    {"layout": "dp=2,pp=2", "microbatches": 4, "zero": 3, "gather": "action"},
    {
        "layout": "dp=2,pp=2",
        "microbatches": 4,
        "zero": 3,
        "gather": "unit",
        "reduce": "microbatch",
        "recompute": "full",
    },
    {"layout": "pp=4", "microbatches": 8},
    {"layout": "pp=2", "microbatches": 4, "schedule": "gpipe"},
    {"layout": "pp=2", "microbatches": 4, "schedule": "interleaved-1f1b", "recompute": "sqrt"},
    {"layout": "pp=2", "microbatches": 4, "schedule": "zb-v"},
    {"layout": "pp=2", "microbatches": 4, "schedule": "zb-h2"},
    {"layout": "pp=2", "microbatches": 4, "schedule": "dualpipe-v"},
    {"layout": "tp=3", "microbatches": 2, "sequence_parallel": True},
    {"layout": "cp=2", "microbatches": 2},
    {"layout": "cp=2", "microbatches": 2, "context": "ulysses"},
    {"layout": "dp=2,ep=2", "microbatches": 2, "model": "tiny-moe"},
    {
        "layout": "dp=2,tp=2,ep=2",
        "microbatches": 2,
        "model": "tiny-moe",
        "sequence_parallel": True,
        "dtype": "bfloat16",
    },
]


@pytest.mark.parametrize("options", PEAKS, ids=str)
def test_the_most_that_lives_in_a_step_is_within_a_twentieth(
    options: dict[str, Any], tmp_path: Path
) -> None:
    check_peak(in_folder(options, tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("options", MORE_PEAKS, ids=str)
def test_the_most_that_lives_in_a_step_is_within_a_twentieth_in_more_layouts(
    options: dict[str, Any], tmp_path: Path
) -> None:
    check_peak(in_folder(options, tmp_path))


def in_folder(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {**options, "offload": f"nvme:{folder}"} if options.get("offload") == "nvme" else options


WIDER = {
    "gelu": attrs.evolve(SHAPES["gelu"], width=128, mlp_width=384),
    "latent": attrs.evolve(
        SHAPES["latent"],
        width=128,
        heads=4,
        kv_heads=4,
        mlp_width=384,
        latent=LatentShape(keys=64, plain=32, turned=16, values=32, queries=96),
    ),
    "words": ModelShape(vocabulary=4096, tied=True),
}


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("name", WIDER)
def test_the_most_that_lives_in_a_step_is_within_a_twentieth_for_other_models(
    name: str, recompute: str
) -> None:
    check_peak({"layout": "tp=2,pp=2", "microbatches": 4, "recompute": recompute}, WIDER[name])


def test_live_storages_are_those_that_pytorchs_own_tracker_counts() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    given_BD = torch.ones(32, 64)

    def step() -> None:
        model(given_BD).logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # makes the states
    theirs = MemTracker()
    theirs.track_external(model, optimizer, given_BD)
    with theirs:
        step()
    with LiveStorages() as ours:
        ours.note(given_BD, *model.parameters(), *states(optimizer))
        ours.reset_peak()
        step()

    found = theirs.get_tracker_snapshot("peak")[torch.device("cpu")]
    assert ours.peak_bytes == found["Total"]


def test_the_readme_says_what_is_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    assert estimates.main() == 0

    tables = capsys.readouterr().out.strip().split("\n\n")
    assert len(tables) == 2
    assert all(table in README.read_text() for table in tables)


@pytest.mark.long
def test_the_readme_says_what_offloaded_runs_hold(tmp_path: Path) -> None:
    assert bounds.table(Sizes(8, 1024, 1024), str(tmp_path)) in README.read_text()


def fitting(options: dict[str, Any], shape: ModelShape) -> RunConfig:
    """Return the settings; a drawn layout that is refused is no example."""
    try:
        config = RunConfig.of(**options)
        check_fits(shape, config)
        make_schedule(config)
    except (ConfigError, ValueError):
        assume(False)
    return config
