"""Settings from files, options and each other: read exactly, or refused with the way out."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainwright.collectives import Communicator, LocalWorld
from trainwright.integration.cli import main, parser
from trainwright.integration.config import RunConfig
from trainwright.integration.data import Corpus
from trainwright.integration.errors import ConfigError
from trainwright.integration.fitting import check_fits
from trainwright.integration.flops import Products, flops_per_token
from trainwright.integration.parts import assemble
from trainwright.integration.rates import learning_rate
from trainwright.integration.recipe import StepRecord, train
from trainwright.integration.settings.batch import BatchSettings, BatchSizes
from trainwright.integration.settings.leaf import Kind
from trainwright.integration.settings.options import written
from trainwright.integration.settings.parallel import ParallelSettings
from trainwright.integration.settings.resolved import resolved, saved_where
from trainwright.integration.settling import settle

TEXTS = {
    "run.toml": 'steps = 7\nlr = 1e-3\n[parallel]\nlayout = "dp=2"\n[saving]\nkeep = 3\n',
    "run.yaml": "steps: 7\nparallel: {layout: dp=2}\noptimizer:\n  lr: 1e-3\nsaving:\n  keep: 3\n",
    "run.json": '{"steps": 7, "parallel": {"layout": "dp=2"}, "lr": 1e-3, "saving": {"keep": 3}}',
}


def _file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def _settled(*arguments: str) -> RunConfig:
    return settle(parser().parse_args(["train", *arguments]))[0]


@pytest.mark.parametrize("name", TEXTS)
def test_a_file_of_any_format_says_the_same_and_options_go_before_it(
    tmp_path: Path, name: str
) -> None:
    path = str(_file(tmp_path, name, TEXTS[name]))

    said = _settled("--config", path)
    changed = _settled("--config", path, "--lr", "0.5", "--keep", "none")

    assert said == RunConfig.of(steps=7, layout="dp=2", lr=1e-3, keep=3)
    assert changed == said.evolve(lr=0.5, keep=None)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", "steps = 1\nsteps = 2\n", ["a.toml", "line 2"]),
        ("a.yaml", "optimizer:\n  lr: 1.0\n  lr: 2.0\n", ["a.yaml", "lr", "more than once"]),
        ("a.json", '{"steps": 1, "steps": 1}', ["a.json", "steps", "more than once"]),
        ("a.yaml", "1: 2\n", ["the key 1 in line 1 is no text"]),
        ("a.yaml", "- steps\n", ["by name, got list"]),
        ("a.yaml", "steps: !!python/object/apply:os.getcwd []\n", ["could not determine"]),
        ("a.ini", "steps = 1\n", ["a.ini", ".toml, .yaml, .yml, .json"]),
        ("a.toml", "[optimizer]\nlrr = 1\n", ["optimizer.lrr", "did you mean optimizer.lr?"]),
        ("a.toml", "[optimzer]\nlr = 1\n", ["optimzer", "did you mean optimizer?"]),
        ("a.toml", "[optimizer]\nsteps = 1\n", ["optimizer.steps", "did you mean steps?"]),
        ("a.toml", "[optimizer]\nzero = 1\n", ["did you mean parallel.zero?"]),
        ("a.toml", "lr = 1.0\n[optimizer]\nlr = 1.0\n", ["lr is given twice", "optimizer.lr"]),
        ("a.toml", "parallel = 3\n", ["parallel is a section", "3"]),
        ("a.toml", 'steps = "many"\n', ["--steps must be a whole number, got 'many'"]),
        ("a.toml", "steps = 1.0\n", ["--steps must be a whole number, got 1.0"]),
        ("a.toml", "steps = true\n", ["--steps must be a whole number, got True"]),
        ("a.toml", "lr = [1.0]\n", ["--lr must be a number, got [1.0]"]),
        ("a.toml", "async_save = 1\n", ["--async-save must be true or false, got 1"]),
        ("a.json", '{"lr": null}', ["--lr must be a number, got None"]),
        ("a.json", '{"lr": NaN}', ["--lr", "finite"]),
        ("a.json", "[" * 60_000, ["a.json", "nested too deep"]),
        ("a.yaml", "[" * 9_000, ["a.yaml", "nested too deep"]),
        ("a.json", " " * 100_000, ["a.json", "longer than 65536 bytes"]),
        ("a.yaml", "seed: &a 1\nsteps: *a\n", ["line 2 has the alias *a", "write out"]),
    ],
)
def test_a_file_that_says_a_thing_twice_or_wrong_is_named_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, words: list[str]
) -> None:
    path = _file(tmp_path, name, text)

    code = main(["train", "--config", str(path)])

    said = capsys.readouterr().err
    assert code == 2
    for word in [*words, name]:
        assert word in said


def test_printed_settings_are_a_file_of_settings_and_numbers_that_follow_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--layout", "dp=2,pp=2", "--micro-batch", "2", "--lr", "3e-4", "--keep", "2"]

    code = main(["train", "--print-config", *arguments])

    said = capsys.readouterr()
    assert code == 0
    assert "global batch 8 = 2 microbatches of 2 sequences on each of 2 data ranks" in said.err
    assert "rises for 50 of 600 updates" in said.err
    assert "layout dp=2,pp=2: 4 ranks, ZeRO stage 0, schedule 1f1b" in said.err
    shape = RunConfig().model.shape
    flops = flops_per_token(Products.of(shape), 128) / 1e6
    assert (
        f"model tiny: {shape.num_parameters:,} parameters, {flops:.1f} MFLOPs a token" in said.err
    )
    assert "[2, 2]" in said.err
    path = _file(tmp_path, "again.json", said.out)
    assert _settled("--config", str(path)) == _settled(*arguments)


def test_a_flat_file_of_an_older_run_still_loads(tmp_path: Path) -> None:
    config = RunConfig.of(layout="dp=2", warmup=3, guards="none", data="a", model="small")
    path = _file(tmp_path, "config.json", json.dumps(config.leaves()))
    assert RunConfig.load(path) == config


def test_options_say_all_that_settings_say() -> None:
    config = RunConfig.of(layout="tp=2", lr=1e-7, sequence_parallel=True, data="-x", keep=1)
    assert _settled(*written(config)) == config


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (Kind(int, optional=True), None, "none"),
        (Kind(str), "none", "none"),
        (Kind(float, many=True), (0.9, 0.95), "0.9,0.95"),
        (Kind(str, optional=True, many=True), ("a",), "a"),
    ],
)
def test_a_value_written_as_an_option_is_read_back(kind: Kind, value: Any, text: str) -> None:
    assert kind.write(value) == text
    assert kind.parse(text) == value
    assert kind.admits(value)


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({"global_batch": 64, "micro_batch": 4}, (64, 4, 4)),
        ({"global_batch": 64}, (64, 16, 1)),
        ({"micro_batch": 4, "microbatches": 2}, (32, 4, 2)),
        ({"micro_batch": 4}, (16, 4, 1)),
        ({"global_batch": 64, "microbatches": 8}, (64, 2, 8)),
        ({"global_batch": 64, "micro_batch": 2, "microbatches": 8}, (64, 2, 8)),
        ({}, (16, 2, 2)),
    ],
)
def test_sizes_of_a_batch_follow_from_any_that_are_set(
    given: dict[str, int], sizes: tuple[int, int, int]
) -> None:
    config = RunConfig.of(layout="dp=4,tp=2", **given)
    assert config.sizes == BatchSizes(*sizes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"global_batch": 30, "micro_batch": 4},
            "global_batch=30 must be a multiple of micro_batch=4 * dp=4 = 16; 16 or 32 works",
        ),
        (
            {"global_batch": 64, "micro_batch": 4, "microbatches": 3},
            "global_batch=64 must be micro_batch=4 * microbatches=3 * dp=4 = 48; microbatches=4 or",
        ),
        ({"global_batch": 3}, "global_batch=3 must be a multiple of dp=4 = 4; 4 works"),
    ],
)
def test_sizes_that_do_not_multiply_out_are_refused_with_all_numbers(
    given: dict[str, int], message: str
) -> None:
    config = RunConfig.of(layout="dp=4,tp=2", **given)
    with pytest.raises(ConfigError) as caught:
        check_fits(config.model.shape, config)
    assert message in str(caught.value)


_SIZE = st.none() | st.integers(1, 12)


@given(whole=st.none() | st.integers(1, 96), micro=_SIZE, count=_SIZE, dp=_SIZE, pp=_SIZE)
@settings(max_examples=40)
def test_sizes_multiply_out_keep_what_is_set_and_are_refused_only_where_nothing_fits(
    whole: int | None, micro: int | None, count: int | None, dp: int | None, pp: int | None
) -> None:
    ranks = dp or 1
    batch = BatchSettings(whole, micro, count)
    total = 16 if whole is None and micro is None else whole
    try:
        sizes = batch.sizes(ranks, pp or 1)
    except ConfigError:
        fits = [
            (m, c)
            for m in ([micro] if micro else range(1, 97))
            for c in ([count] if count else range(1, 97))
            if total is None or m * c * ranks == total
        ]
        assert not fits or (total == 16 and whole is None and count is None)
        return
    assert sizes.global_batch == sizes.micro_batch * sizes.microbatches * ranks
    assert sizes.global_batch == (total or sizes.global_batch)
    assert sizes.micro_batch == (micro or sizes.micro_batch)
    assert sizes.microbatches == (count or sizes.microbatches)


def test_a_pipeline_gets_as_many_microbatches_as_keep_it_busy() -> None:
    assert BatchSettings(global_batch=24).sizes(dp=1, pp=4).microbatches == 4
    assert BatchSettings(global_batch=24).sizes(dp=4, pp=4).microbatches == 3
    assert BatchSettings(micro_batch=2).sizes(dp=2, pp=4) == BatchSizes(16, 2, 4)


def test_a_fraction_of_the_steps_and_a_number_of_them_are_two_settings() -> None:
    assert RunConfig.of(warmup_fraction=1.0, steps=540).rate.warmup_steps(540) == 540
    assert RunConfig.of(warmup_fraction=0.1).rate.warmup_steps(540) == 54
    assert RunConfig.of(warmup=1).rate.warmup_steps(540) == 1
    tenth = RunConfig.of(warmup_fraction=0.1, steps=540)
    assert "rises for 54 of 540" in "".join(resolved(tenth, tenth.model.shape))
    for wrong, message in (
        ({"warmup": 1.0}, "--warmup must be a whole number or none, got 1.0"),
        ({"warmup_fraction": 1.5}, "--warmup-fraction must be from 0 to 1, got 1.5"),
        ({"warmup": 5, "warmup_fraction": 0.5}, "--warmup 5 and --warmup-fraction 0.5"),
    ):
        with pytest.raises(ConfigError, match=message):
            RunConfig.of(**wrong)


@pytest.mark.parametrize(
    ("pp", "first", "last", "sizes"),
    [
        (4, 11, 11, [11, 12, 12, 11]),
        (2, None, None, [23, 23]),
        (4, None, None, [12, 12, 11, 11]),
        (3, 10, None, [10, 18, 18]),
        (3, None, 10, [18, 18, 10]),
        (2, 11, 35, [11, 35]),
    ],
)
def test_stages_whose_layers_are_not_set_share_the_others_out_evenly(
    pp: int, first: int | None, last: int | None, sizes: list[int]
) -> None:
    parallel = ParallelSettings(layout=f"pp={pp}", first_stage_layers=first, last_stage_layers=last)
    found = parallel.layers_of_stages(46)
    assert [len(each) for each in found] == sizes
    assert [layer for each in found for layer in each] == list(range(46))


@pytest.mark.parametrize(
    ("pp", "first", "last", "message"),
    [
        (2, 11, 11, "11 + --last-stage-layers 11 must equal the 46 layers"),
        (4, 22, 23, "leave 1 of the 46 layers for the other 2 of 4 stages"),
        (4, 46, None, "leave 0 of the 46 layers for the other 3 of 4 stages"),
        (4, 47, None, "leave -1 of the 46 layers"),
        (
            2,
            11,
            None,
            "11 + last must equal 46, the layers of the model; set --last-stage",
        ),
        (
            2,
            None,
            11,
            "11 + first must equal 46, the layers of the model; set --first",
        ),
        (2, 46, None, "46 + last must equal 46, the layers of the model; leave it out"),
        (1, 46, None, "one stage has all 46 layers"),
    ],
)
def test_layers_of_stages_that_do_not_add_up_are_refused_with_the_numbers(
    pp: int, first: int | None, last: int | None, message: str
) -> None:
    parallel = ParallelSettings(layout=f"pp={pp}", first_stage_layers=first, last_stage_layers=last)
    with pytest.raises(ConfigError) as caught:
        parallel.layers_of_stages(46)
    assert message in str(caught.value)


def test_a_pipeline_computes_the_same_whatever_layers_its_stages_have() -> None:
    corpus = Corpus(
        train=np.arange(600, dtype=np.uint8) % 50,
        held_out=np.zeros(40, dtype=np.uint8),
        files=1,
        skipped=(),
        source="numbers",
    )

    def work(world: Communicator, **sizes: int) -> tuple[list[int], float]:
        config = RunConfig.of(layout="pp=2", steps=2, global_batch=2, sequence_length=8, **sizes)
        parts = assemble(config, world, corpus)
        records: list[StepRecord] = []
        train(parts, parts.start(), [records.append])
        layers = [len(stage.model.layers) for stage in parts.model.stages.values()]
        return layers, records[-1].loss

    even = LocalWorld(2).run(work)
    uneven = LocalWorld(2).run(functools.partial(work, first_stage_layers=1, last_stage_layers=3))

    assert [layers for layers, _ in even] == [[2], [2]]
    assert [layers for layers, _ in uneven] == [[1], [3]]
    assert even[0][1] == uneven[0][1]


@pytest.mark.parametrize(
    ("begun", "options", "words"),
    [
        (
            {"steps": 200, "warmup": 20},
            ["--steps", "400"],
            ["--steps 400, where the run had 200", "--warmup 20 --decay-steps 180 keeps"],
        ),
        ({"steps": 200}, ["--steps", "100"], ["--steps 100, where the run had 200, moves"]),
        ({"steps": 200, "lr_schedule": "constant", "warmup": 9}, ["--steps", "400"], []),
        ({"steps": 200}, ["--steps", "400", "--warmup", "50", "--decay-steps", "150"], []),
        ({"steps": 200}, ["--steps", "200"], []),
        ({"steps": 200}, ["--lr", "0.1"], []),
    ],
)
def test_a_resumed_run_is_told_where_more_steps_move_its_learning_rate(
    tmp_path: Path, begun: dict[str, Any], options: list[str], words: list[str]
) -> None:
    RunConfig.of(**begun).save(tmp_path / "config.json")
    told: list[str] = []

    settle(parser().parse_args(["train", "--resume", str(tmp_path), *options]), told.append)

    assert len(told) == bool(words)
    for word in words:
        assert word in told[0]


def test_what_the_line_on_moved_rates_offers_keeps_them() -> None:
    before = RunConfig.of(steps=200, warmup=20)
    rates = learning_rate(before.rate, before.optimizer.lr, 200)
    after = before.evolve(steps=400, warmup=20, decay_steps=180)
    kept = learning_rate(after.rate, after.optimizer.lr, 400)
    assert [kept(update) for update in range(200)] == [rates(update) for update in range(200)]


def test_numbers_are_told_with_what_they_count_and_checkpoints_with_their_place() -> None:
    alone = RunConfig.of(global_batch=4, microbatches=1, steps=1, warmup=0)
    told = list(resolved(alone, alone.model.shape))
    assert told[1] == "layout dp=1: 1 rank, ZeRO stage 0"
    assert told[2] == "global batch 4 = 1 microbatch of 4 sequences on one data rank"
    assert told[3] == "the learning rate rises for 0 of 1 update"
    assert saved_where(alone, "a/b") == "a checkpoint at the end: a/b"
    kept = RunConfig.of(save_every=5, keep=2, keep_every=10)
    assert saved_where(kept, "a/b") == (
        "checkpoints every 5 steps and at the end, of which the last 2 stay, one before each "
        "snapshot of the guards, those of every 10 steps: a/b"
    )


words = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="@,\0"), min_size=1, max_size=12
)
DRAWN: dict[str, st.SearchStrategy[Any]] = {
    "steps": st.integers(1, 2**63 - 1),
    "seed": st.integers(0, 2**63 - 1),
    "dtype": st.sampled_from(["float32", "float64", "bfloat16", "fp8-row"]),
    "layout": st.sampled_from(["dp=1", "dp=4,dp_shard=2", "pp=2,tp=2", "dp=2,cp=2,ep=4"]),
    "zero": st.integers(0, 3),
    "bucket_bytes": st.none() | st.integers(1, 2**40),
    "reduce_dtype": st.sampled_from([None, "bfloat16"]),
    "overlap": st.booleans(),
    "schedule": st.sampled_from(["1f1b", "zb-v"]),
    "sequence_length": st.integers(1, 2**40),
    "microbatches": st.none() | st.integers(1, 9),
    "z_loss": st.none() | st.floats(1e-12, 1e12),
    "data": st.none() | words,
    "text_field": words,
    "held_out_share": st.floats(0.001, 0.5),
    "lr": st.floats(1e-300, 1e300),
    "clip": st.floats(0.0, 1e300),
    "weight_decay": st.none() | st.floats(0.0, 10.0),
    "beta1": st.none() | st.floats(0.0, 0.999),
    "warmup": st.none() | st.integers(0, 2**62),
    "keep": st.none() | st.integers(1, 9),
    "async_save": st.booleans(),
    "guards": words,
    "exclude": st.none() | words,
    "measure_every": st.none() | st.integers(0, 9),
}


@settings(max_examples=40)
@given(st.fixed_dictionaries({}, optional=DRAWN), st.sampled_from([".json", ".yaml"]))
@example({"clip": 2.0**63}, ".json")
@example({"guards": "\U00010000"}, ".yaml")
@example({"data": "none", "lr": 5e-324, "clip": -0.0}, ".json")
@example({"data": "--steps", "text_field": "yes", "guards": "1e3"}, ".yaml")
def test_settings_say_the_same_printed_on_the_command_line_and_in_a_file(
    leaves: dict[str, Any], ending: str
) -> None:
    config = RunConfig.of(**leaves)

    with TemporaryDirectory() as folder:
        path = Path(folder) / f"printed{ending}"
        path.write_text(config.text(), encoding="utf-8")
        assert RunConfig.load(path) == config
    assert settle(parser().parse_args(["train", *written(config)]))[0] == config
    assert RunConfig().evolve(**config.leaves()) == config
