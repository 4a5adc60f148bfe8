"""Settings that cannot work are refused before any work, with the way out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from trainwright.checkpointing.activations import keep_all
from trainwright.integration.cli import main, parser
from trainwright.integration.config import RunConfig
from trainwright.integration.errors import ConfigError
from trainwright.integration.fitting import check_fits
from trainwright.integration.guarding import read_guards
from trainwright.integration.hugging_face.config import write_config
from trainwright.integration.launch import ProcessPlace, place_in_environment
from trainwright.integration.model import (
    ExpertShape,
    ModelShape,
    PlainLayers,
    build_stage,
    preset,
)
from trainwright.integration.settling import settle, worker_arguments
from trainwright.sharding.expert import Routing
from trainwright.stability_guards import (
    EmptyStepGuard,
    Positions,
    SpikeGuard,
    StallGuard,
    Verdict,
    any_of,
)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("tp=5", ["tp=5", "heads=4", "up to 4"]),
        ("pp=5", ["pp=5", "has 4", "up to 4"]),
        ("dp=3", ["16", "dp=3", "12 or 18"]),
        ("cp=200", ["cp=200", "128 has fewer positions", "cp up to 128"]),
        ("ep=2,dp=2", ["ep=2", "tiny has none", "--model tiny-moe"]),
        ("etp=2,dp=2", ["etp=2", "tiny has none", "--model tiny-moe"]),
        ("dp=2,dp=2", ["dp"]),
        ("dp=0", ["dp"]),
        ("dp=two", ["two"]),
        ("dq=2", ["dq", "dp"]),
    ],
)
def test_a_layout_that_does_not_fit_names_the_sizes_that_do(layout: str, words: list[str]) -> None:
    config = RunConfig.of(layout=layout)
    with pytest.raises(ConfigError) as caught:
        check_fits(config.model.shape, config)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("steps", 0, "positive"),
        ("lr", -1.0, "positive"),
        ("dtype", "float23", "float32"),
        ("schedule", "1f1B", "did you mean 1f1b"),
        ("zero", 4, "0, 1, 2, 3"),
        ("gather", "often", "unit"),
        ("reduce", "never", "microbatch"),
        ("seed", -1, "negative"),
        ("seed", 10**23, "below 2**63"),
        ("lr", float("nan"), "finite"),
        ("lr", float("inf"), "finite"),
        ("clip", float("nan"), "negative"),
        ("weight_decay", float("nan"), "negative"),
    ],
)
def test_a_setting_out_of_range_names_option_value_and_rule(
    name: str, value: object, word: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.of(**{name: value})
    assert word in str(caught.value)
    assert str(value) in str(caught.value)
    assert "--" + name.replace("_", "-") in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule": "zb-v", "chunks": 3}, ["zb-v", "has 2 a rank", "interleaved-1f1b"]),
        ({"schedule": "1f1b", "chunks": 2}, ["1f1b", "has 1 a rank"]),
        ({"schedule": "zb-v", "layout": "pp=3"}, ["pp=3 x 2 chunks", "has 4", "up to 2"]),
        (
            {"schedule": "breadth-first", "chunks": 5},
            ["pp=1 x 5 chunks", "has 4", "--chunks up to 4"],
        ),
    ],
)
def test_a_schedule_that_wants_other_chunks_or_more_layers_says_how_many(
    changes: dict[str, object], words: list[str]
) -> None:
    config = RunConfig.of(**changes)
    with pytest.raises(ConfigError) as caught:
        check_fits(config.model.shape, config)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"gather": "unit", "zero": 2},
        {"reduce": "microbatch", "zero": 1},
        {"layout": "dp=4,dp_shard=2"},
    ],
)
def test_an_option_of_sharding_without_effect_is_refused(changes: dict[str, object]) -> None:
    config = RunConfig.of(**changes)
    with pytest.raises(ConfigError, match="has no effect with --zero"):
        check_fits(config.model.shape, config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "fp8-mx", "model": "tiny-moe"}, ["experts", "bfloat16 works"]),
        ({"dtype": "fp8-mx", "layout": "cp=2"}, ["cp=2", "fp8-row"]),
        (
            {"dtype": "fp8-block", "layout": "tp=2"},
            ["128 features of queries", "at 64", "block of 128", "fp8-row"],
        ),
    ],
)
def test_fp8_blocks_that_ranks_would_share_and_experts_are_refused(
    changes: dict[str, object], words: list[str]
) -> None:
    config = RunConfig.of(**changes)
    with pytest.raises(ConfigError) as caught:
        check_fits(config.model.shape, config)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [("fp8-mx", "tp=3"), ("fp8-block", "dp=2,pp=2"), ("fp8-row", "tp=4"), ("fp8-delayed", "cp=2")],
)
def test_fp8_products_fit_where_every_rank_has_whole_blocks(dtype: str, layout: str) -> None:
    config = RunConfig.of(dtype=dtype, layout=layout)
    check_fits(config.model.shape, config)


def test_an_unknown_setting_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"did you mean batch\.global_batch"):
        RunConfig.from_mapping({"global_bach": 3})


def test_an_unknown_model_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean tiny"):
        preset("tini")


@pytest.mark.parametrize(
    "changes",
    [{"heads": 3}, {"kv_heads": 3}, {"layers": 0}, {"width": 12, "heads": 4}, {"vocabulary": -1}],
)
def test_model_sizes_that_do_not_divide_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        attrs.evolve(ModelShape(), **changes)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("tiny", 0.8), ("tiny-tied", 0.8), ("tiny-moe", 2.0), ("small", 13), ("base", 76)],
)
def test_a_preset_has_as_many_parameters_as_it_says(name: str, millions: float) -> None:
    shape = preset(name)
    with torch.device("meta"):
        model = build_stage(shape, PlainLayers(), range(shape.layers), keep_all())

    assert sum(weight.numel() for weight in model.parameters()) == shape.num_parameters
    assert abs(shape.num_parameters / 1e6 / millions - 1) < 0.07


@pytest.mark.parametrize("rule", [{"capacity_factor": 1.0}, {"scope": "microbatch"}])
def test_the_plain_model_refuses_a_rule_of_experts_that_it_does_not_compute(
    rule: dict[str, Any],
) -> None:
    with pytest.raises(ConfigError, match="plain experts have no capacity"):
        PlainLayers().experts(8, ExpertShape(Routing(4, 2, **rule), width=8))


def test_settings_survive_a_file(tmp_path: Path) -> None:
    config = RunConfig.of(layout="dp=2", lr=1e-4, data="some/where")
    config.save(tmp_path / "config.json")
    assert RunConfig.load(tmp_path / "config.json") == config


@pytest.mark.parametrize(
    "content",
    ["", "[1]", "{", '{"stepz": 1}', '{"steps": "x"}', '{"steps": 1.5}', '{"layout": 5}'],
)
def test_a_damaged_settings_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ConfigError):
        RunConfig.load(path)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_workers_get_exactly_the_settings_of_the_launcher(sequence_parallel: bool) -> None:
    config = RunConfig.of(layout="dp=2,tp=2", lr=1.5e-4, steps=7, dtype="float64", data="x", zero=1)
    config = config.evolve(sequence_parallel=sequence_parallel)
    arguments = worker_arguments(config, "somewhere", resume=False, as_json=True)
    again, out, resume = settle(parser().parse_args(arguments))
    assert (again, out, resume) == (config, "somewhere", False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--stepz", "3"], ["--stepz"]),
        (["train", "--steps", "many"], ["--steps", "many"]),
        (["train", "--layout", "dp=2,tp=8"], ["tp=8"]),
        (["train", "--comm", "shn"], ["--comm", "shn", "shm"]),
        (["train", "--comm", "shm", "--threads-as-ranks"], ["--comm threads", "shm"]),
        (["train", "--layout", "dp=2", "--sequence-parallel"], ["--sequence-parallel", "set tp"]),
        (
            ["train", "--layout", "tp=4", "--sequence-parallel", "--sequence-length", "3"],
            ["--sequence-length 3", "tp=4"],
        ),
        (["train", "--data", "no/such/path"], ["no/such/path", "does not exist"]),
        (["train", "--resume", "no/such/run"], ["no/such/run", "config.json"]),
        (["train", "--recompute", "every-0"], ["every-0"]),
        (["train", "--recompute", "some"], ["some"]),
        (
            ["train", "--recompute", "budget:9MB", "--zero", "3", "--layout", "dp=2"],
            ["budget:9MB", "unit by unit", "--gather step works"],
        ),
        (
            [
                "train",
                "--gather",
                "unit",
                "--zero",
                "3",
                "--schedule",
                "zb-v",
                "--model",
                "tiny-tied",
                "--layout",
                "dp=2",
            ],
            ["--gather unit", "zb-v", "tied embedding", "--gather step or action works"],
        ),
        (["trane"], ["trane"]),
    ],
)
def test_the_command_line_answers_bad_input_in_one_line_with_code_2(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(arguments)
    said = capsys.readouterr().err
    assert code == 2
    assert said.startswith("trainwright: ")
    assert "Traceback" not in said
    for word in words:
        assert word in said


def test_a_used_run_folder_is_refused_and_resume_offered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    code = main(["train", "--out", str(tmp_path), "--threads-as-ranks"])
    assert code == 2
    assert f"--resume {tmp_path}" in capsys.readouterr().err


def test_a_file_where_the_run_folder_should_be_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    code = main(["train", "--out", str(tmp_path / "file"), "--threads-as-ranks"])
    assert code == 2
    assert "is a file" in capsys.readouterr().err


def test_more_processes_than_a_machine_runs_are_not_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = ["--layout", "dp=5000", "--global-batch", "10000", "--microbatches", "1"]
    code = main(["train", *layout, "--out", str(tmp_path / "run")])
    said = capsys.readouterr().err
    assert code == 2
    assert "5000 processes" in said
    assert "torchrun" in said
    assert not (tmp_path / "run").exists()


def test_a_rank_without_a_meeting_place_is_told_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        place_in_environment({"RANK": "0", "WORLD_SIZE": "2"})


def test_out_and_resume_of_two_folders_contradict(tmp_path: Path) -> None:
    options = parser().parse_args(["train", "--resume", str(tmp_path), "--out", "elsewhere"])
    with pytest.raises(ConfigError, match="contradicts"):
        settle(options)


@pytest.mark.parametrize(("option", "value"), [("--seed", "7"), ("--sequence-length", "64")])
def test_a_resumed_run_keeps_what_its_position_in_the_data_means(
    tmp_path: Path, option: str, value: str
) -> None:
    RunConfig().save(tmp_path / "config.json")
    options = parser().parse_args(["train", "--resume", str(tmp_path), option, value])
    with pytest.raises(ConfigError, match="position in the data"):
        settle(options)


@pytest.mark.parametrize("option", ["--model", "--model-config"])
def test_a_resumed_run_refuses_the_folder_of_another_model(tmp_path: Path, option: str) -> None:
    run, same, other = (tmp_path / name for name in ("run", "same", "other"))
    for folder, layers in ((run / "model", 2), (same, 2), (other, 3)):
        shape = ModelShape(width=16, layers=layers, heads=4, kv_heads=2, mlp_width=24)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(write_config(shape, torch.float32)))
    RunConfig.of(model=str(same)).save(run / "config.json")
    resume = ["train", "--resume", str(run)]

    with pytest.raises(ConfigError, match="another model than that of the run"):
        settle(parser().parse_args([*resume, option, str(other)]))
    with pytest.raises(ConfigError, match="another model than that of the run"):
        settle(parser().parse_args([*resume, "--model", "small"]))

    config, _, _ = settle(parser().parse_args([*resume, option, str(same)]))
    assert config.model.shape.layers == 2


def test_a_resumed_run_keeps_its_optimizer(tmp_path: Path) -> None:
    RunConfig.of(optimizer="lion").save(tmp_path / "config.json")
    resume = ["train", "--resume", str(tmp_path)]
    with pytest.raises(ConfigError, match="--optimizer sgd differs from the run's lion"):
        settle(parser().parse_args([*resume, "--optimizer", "sgd"]))
    config, _, _ = settle(parser().parse_args([*resume, "--optimizer", "lion", "--beta2", "0.9"]))
    assert config.optimizer.beta2 == 0.9


@pytest.mark.parametrize(
    ("leaves", "words"),
    [
        ({"momentum": 0.9}, ["--momentum", "--optimizer adamw", "--beta1, --beta2, --eps"]),
        ({"optimizer": "sgd", "beta2": 0.9}, ["--beta2", "sgd", "--momentum, --nesterov"]),
        ({"optimizer": "adafactor", "eps": 1e-3}, ["--eps", "adafactor", "leave it out"]),
        ({"optimizer": "sgd", "momentum": 0.0, "nesterov": True}, ["--nesterov", "--momentum"]),
        ({"optimizer": "moun"}, ["--optimizer", "moun", "did you mean muon"]),
        ({"beta1": 1.0}, ["--beta1", "below 1", "1.0"]),
        ({"optimizer": "muon", "momentum": -0.5}, ["--momentum", "-0.5"]),
        ({"eps": 0.0}, ["--eps", "positive"]),
    ],
)
def test_an_option_that_the_optimizer_does_not_use_is_refused(
    leaves: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.of(**leaves)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "decay"),
    [("adamw", 0.1), ("lion", 0.1), ("muon", 0.1), ("adafactor", 0.1), ("adam", 0.0), ("sgd", 0.0)],
)
def test_matrices_decay_by_a_tenth_but_where_that_is_part_of_the_gradient(
    name: str, decay: float
) -> None:
    assert RunConfig.of(optimizer=name).optimizer.decay == decay
    assert RunConfig.of(optimizer=name, weight_decay=0.02).optimizer.decay == 0.02


@pytest.mark.parametrize("nesterov", [None, True, False])
def test_workers_are_told_whether_to_look_ahead_only_where_that_was_said(
    nesterov: bool | None,
) -> None:
    config = RunConfig.of(optimizer="sgd", momentum=0.8, nesterov=nesterov)
    again, _, _ = settle(parser().parse_args(worker_arguments(config, "x", False, False)))
    assert again == config


def test_the_environment_of_torchrun_and_of_slurm_place_a_process() -> None:
    torchrun = {
        "TORCHELASTIC_RUN_ID": "x",
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
    }
    slurm = {
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "16",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS_PER_NODE": "4",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
    }
    assert place_in_environment(torchrun) == ProcessPlace(3, 8, 1, 2)
    assert place_in_environment(slurm) == ProcessPlace(5, 16, 1, 4)
    assert place_in_environment({}) is None
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        place_in_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"})


MEETING = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "0"}, ["lacks WORLD_SIZE", "unset RANK and WORLD_SIZE"]),
        ({"WORLD_SIZE": "2"}, ["lacks RANK"]),
        ({"TORCHELASTIC_RUN_ID": "x"}, ["lacks RANK, WORLD_SIZE", "torchrun"]),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ["RANK=2 of WORLD_SIZE=2", "from 0 to below"]),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, ["RANK=-1"]),
        ({"RANK": "0", "WORLD_SIZE": "0"}, ["WORLD_SIZE=0"]),
        ({"RANK": "", "WORLD_SIZE": "2"}, ["must be numbers"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2"}, ["LOCAL_RANK=2"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "x"}, ["MASTER_PORT", "free port"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": ""}, ["MASTER_ADDR"]),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "two"}, ["SLURM_NTASKS", "must be numbers"]),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "2"}, ["SLURM_PROCID=3 of SLURM_NTASKS=2"]),
    ],
)
def test_an_environment_that_is_half_set_or_says_no_place_is_refused(
    environment: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        place_in_environment({**MEETING, **environment})
    for word in words:
        assert word in str(caught.value)
    assert place_in_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--keep", "0"], "--keep must be positive"),
        (["--keep-every", "-1"], "--keep-every must be positive"),
        (["--save-every", "10", "--keep-every", "20"], "no effect without --keep"),
        (["--keep", "1", "--keep-every", "20"], "no effect with --save-every 0"),
        (["--async-save"], "--async-save has no effect with --save-every 0"),
        (["--scale-window", "9"], "--scale-window 9 has no effect with --dtype float32"),
        (["--held-out", "a", "--held-out-share", "0.2"], "--held-out-share 0.2 has no effect"),
        (["--context", "ulysses"], "--context ulysses has no effect with --layout dp=1"),
        (["--context", "rings"], "did you mean ring?"),
        (["--context", "hybrid", "--layout", "cp=3"], "make no rows of two and more"),
        (
            ["--keep", "1", "--save-every", "10", "--keep-every", "25"],
            "must be a multiple of --save-every 10; 20 or 30 works",
        ),
        (["--keep", "1", "--save-every", "10", "--keep-every", "5"], "--save-every 10; 10 works"),
        (["--allow-other-data"], "--allow-other-data has no effect without --resume"),
    ],
)
def test_options_of_saving_that_make_no_sense_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.txt").write_text("some text " * 400)
    given = ["--threads-as-ranks", "--data", str(tmp_path / "data.txt"), "--out"]

    code = main(["train", *given, str(tmp_path / "run"), *arguments])

    assert code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_settings_written_before_an_option_was_known_take_its_default() -> None:
    values = RunConfig.of(save_every=10).leaves()
    for name in ("keep", "keep_every", "async_save"):
        del values[name]
    assert RunConfig.from_mapping(values) == RunConfig.of(save_every=10)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "must be a JSON object"),
        ('{"guard": {}}', "did you mean 'guards'?"),
        ('{"guards": {"joint-spikes": {}}}', "did you mean 'joint-spike'?"),
        ('{"guards": {"spike": {"windows": 3}}}', "did you mean 'window'?"),
        ('{"guards": {"joint-spike": {"escalate": {"skip": 1}}}}', "did you mean 'skips'?"),
        ('{"guards": {"stall": 3}}', "an object of its arguments"),
        ('{"guards": {}, "recovery": {"max_rollbacks": -1}}', "max_rollbacks"),
        ('{"guards": {}, "snapshots": 1.5}', "snapshots must be a whole number"),
        ('{"snapshots": 1}', 'must name "guards"'),
        ('{"guards": {"stall": {}, "stall": {}}}', "stall is there more than once"),
        ('{"guards": {"spike": {"signal": "los"}}}', "signal must be one of ('loss', 'norm')"),
        ('{"guards": {"stall": {"verdict": 2}}}', "'ROLLBACK', 'HALT'), got 2"),
        ('{"guards": {"stall": {"patience": "1"}}}', "patience must be a whole number"),
        ('{"guards": {}, "recovery": {"replay_skipped": "no"}}', "must be true or false"),
    ],
)
def test_a_file_of_guards_that_says_what_is_not_known_is_refused(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "guards.json"
    path.write_text(content)

    with pytest.raises(ConfigError, match=re.escape(message)):
        read_guards(str(path))


@pytest.mark.parametrize("content", ["[1, [0, 281474976710657]]", "[9223372036854775808]"])
def test_positions_to_leave_out_that_end_nowhere_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "exclude.json"
    path.write_text(content)

    with pytest.raises(ConfigError, match="nothing to read behind them"):
        read_guards("default", str(path))


def test_a_file_of_guards_is_what_it_says(tmp_path: Path) -> None:
    path, exclude = tmp_path / "guards.json", tmp_path / "exclude.json"
    values = {
        "guards": {"stall": {"verdict": "SKIP"}, "spike": {}},
        "recovery": {"snapshot_every": 7},
        "replicas_every": 5,
    }
    path.write_text(json.dumps(values))
    exclude.write_text("[3, [5, 8]]")

    plan = read_guards(str(path), str(exclude), scales_losses=True)

    named = (StallGuard(verdict=Verdict.SKIP), SpikeGuard("loss"))
    assert plan.guard == any_of(EmptyStepGuard(), *named)
    assert (plan.recovery.snapshot_every, plan.recovery.replay_skipped) == (7, True)
    assert (plan.snapshots, plan.replicas_every) == (2, 5)
    assert plan.exclude == Positions([(3, 4), (5, 8)])
    assert read_guards("none").snapshots == 0


def test_settings_too_long_to_be_read_again_are_not_written(tmp_path: Path) -> None:
    config = RunConfig.of(data=",".join(f"folder/{number}.txt@1" for number in range(5000)))

    with pytest.raises(ConfigError, match="could not be resumed with more than 65,536"):
        config.save(tmp_path / "config.json")

    assert list(tmp_path.iterdir()) == []
