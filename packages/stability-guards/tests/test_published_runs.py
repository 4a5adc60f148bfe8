"""Presets say what their sources print, and make schedules and ramps that run."""

import json
import math
from pathlib import Path

import pytest

from trainwright.stability_guards import (
    LLAMA3_INTERRUPTIONS,
    PUBLISHED,
    GuardError,
    OverRamp,
    Transition,
    checkpoint_interval,
    mean_time_between_failures,
    published,
)
from trainwright.stability_guards.hygiene import Z_LOSS

RECORDS = {
    record["id"]: record
    for record in json.loads((Path(__file__).parent / "published_stability.json").read_text())
}
GPT3 = {
    "gpt3.Small": "gpt3-125m",
    "gpt3.Medium": "gpt3-350m",
    "gpt3.Large": "gpt3-760m",
    "gpt3.XL": "gpt3-1.3b",
    "gpt3.6.7B": "gpt3-6.7b",
    "gpt3.175B": "gpt3-175b",
}
UNITS = {"M tokens": 1e6, "B tokens": 1e9, "K tokens": 1e3, "B": 1e9, "T": 1e12}


def check(record, **found):
    """Each number printed, in its unit, within half of its last digit."""
    outputs = RECORDS[record]["outputs"]
    for name, value in found.items():
        printed, unit, half = outputs[name]
        assert value / UNITS.get(unit, 1.0) == pytest.approx(printed, abs=half), name


@pytest.mark.parametrize(("record", "name"), GPT3.items())
def test_gpt_3s_rates_and_batches_are_those_of_its_table(record, name):
    run = PUBLISHED[name]

    check(record, batch=run.batch_tokens, learning_rate=run.peak)
    check(
        "gpt3.optim",
        beta1=run.betas[0],
        beta2=run.betas[1],
        eps=run.eps,
        clip=run.clip,
        weight_decay=run.weight_decay,
        warmup=run.warmup_tokens,
        cosine_horizon=run.decay_tokens,
        final_lr_fraction=run.floor / run.peak,
        batch_ramp_start=run.first_batch_tokens,
    )
    assert [t / 1e9 for t in run.ramp_tokens] == RECORDS["gpt3.optim"]["outputs"][
        "batch_ramp_tokens"
    ][0]


@pytest.mark.parametrize("record", GPT3)
def test_gpt_3s_sizes_have_the_parameters_that_its_table_prints(record):
    shape = RECORDS[record]["inputs"]
    weights = 12 * shape["layers"] * shape["d_model"] ** 2
    tables = (50257 + shape["ctx"]) * shape["d_model"]

    printed, _, _ = RECORDS[record]["outputs"]["params"]
    # The table rounds to two digits.
    assert weights + tables == pytest.approx(printed, rel=0.02)


def test_opt_bloom_and_fms_are_trained_as_they_say():
    opt, bloom, fms = (PUBLISHED[name] for name in ("opt-175b", "bloom-176b", "fms-7b"))

    check(
        "opt175.hparams",
        lr=opt.peak,
        batch=opt.batch_tokens,
        beta1=opt.betas[0],
        beta2=opt.betas[1],
        weight_decay=opt.weight_decay,
        clip_initial=opt.clip,
        clip_later=published.OPT_CLIPS[-1],
        warmup_steps=opt.warmup_updates,
        warmup_small_models=PUBLISHED["gpt3-125m"].warmup_tokens,
        decay_to_fraction=opt.floor / opt.peak,
        decay_tokens=opt.decay_tokens,
    )
    check(
        "bloom.hparams",
        lr=bloom.peak,
        min_lr=bloom.floor,
        beta1=bloom.betas[0],
        beta2=bloom.betas[1],
        weight_decay=bloom.weight_decay,
        clip=bloom.clip,
        warmup=bloom.warmup_tokens,
    )
    check(
        "fms.7b.hparams",
        lr=fms.peak,
        final_lr=fms.floor,
        decay_tokens=fms.decay_tokens,
        batch=fms.batch_tokens,
        beta1=fms.betas[0],
        beta2=fms.betas[1],
        weight_decay=fms.weight_decay,
    )
    assert fms.batch_tokens == RECORDS["fms.7b.hparams"]["check"]["tokens_per_batch"]


def test_palm_clips_at_one_with_its_z_loss_and_says_how_it_restarted():
    palm = PUBLISHED["palm-540b"]

    check("palm.hparams", clip=palm.clip)
    assert palm.weight_decay is None
    assert RECORDS["palm.hparams"]["outputs"]["z_loss"][0] == "1e-4 * log^2(Z)"
    assert palm.z_loss == Z_LOSS == 1e-4
    spikes = RECORDS["palm.spikes"]["outputs"]
    assert spikes["restart_before_spike"][0] == published.PALM_RESTART_BEFORE
    assert tuple(spikes["batches_skipped"][0]) == published.PALM_SKIPPED


def test_opts_and_glms_log_books_are_kept():
    log = RECORDS["opt175.logbook"]["outputs"]
    assert tuple(log["clip_sequence"][0]) == published.OPT_CLIPS
    assert tuple(log["weight_decay_change"][0]) == published.OPT_WEIGHT_DECAYS
    assert tuple(log["beta2_change"][0]) == published.OPT_BETA2S
    assert (log["lr_initial"][0], log["end_lr_initial"][0]) == published.OPT_FIRST_RATES
    shrink = RECORDS["glm130.egs"]["outputs"]
    assert shrink["embedding_gradient_shrink_alpha"][0] == published.GLM_SHRINK
    begin, length = published.GLM_SHRINK_ENDS
    words = f"warmed up to 1 from step {begin} within {length} steps"
    assert words in shrink["alpha_schedule"][0]
    assert Transition(published.GLM_SHRINK, 1.0, begin, length)(begin + length) == 1.0
    every = RECORDS["glm130.ckpt"]["outputs"]["save_interval_change"][0]
    assert tuple(every) == published.GLM_CHECKPOINTS_EVERY


def test_llama_3s_interruptions_add_up_and_their_shares_are_of_all():
    causes = {r["cause"]: r for r in RECORDS.values() if "cause" in r}

    assert {c: r["outputs"]["interruptions"][0] for c, r in causes.items()} == LLAMA3_INTERRUPTIONS
    assert sum(LLAMA3_INTERRUPTIONS.values()) == 419
    for cause, record in causes.items():
        share = 100 * LLAMA3_INTERRUPTIONS[cause] / 419
        assert share == pytest.approx(record["check"]["share_of_419_%"], abs=0.05)
        if cause != "Faulty GPU":  # printed as 30.1%
            check(record["id"], share=share)


def test_checkpoints_lose_least_at_the_interval_of_young():
    failure_s = mean_time_between_failures(54 * 86400, 419, 16384, 16384)
    best = checkpoint_interval(60.0, failure_s)

    def lost(interval):
        return 60.0 / interval + interval / (2 * failure_s)

    assert failure_s == pytest.approx(3.09 * 3600, rel=2e-3)
    assert best == math.sqrt(2 * 60.0 * failure_s)
    assert all(lost(best) < lost(best * factor) for factor in (0.5, 0.9, 1.1, 2.0))
    assert mean_time_between_failures(54 * 86400, 419, 16384, 1024) == pytest.approx(16 * failure_s)


def test_common_settings_are_those_of_the_facts():
    common = PUBLISHED["common"]

    assert (common.warmup_updates, common.clip, common.weight_decay) == (2000, 1.0, 0.1)
    assert common.betas == (0.9, 0.95)


@pytest.mark.parametrize("name", [*GPT3.values(), "opt-175b"])
def test_a_preset_makes_a_schedule_and_a_ramp_that_end_where_it_says(name):
    run = PUBLISHED[name]
    ramp = run.ramp(multiple_of=16 * 512)
    rate = OverRamp(run.schedule(), ramp)

    end = ramp.updates(run.decay_tokens)
    assert 0.0 < rate(0) < run.peak
    assert rate(end + 1) == pytest.approx(run.floor)
    assert run.batch_tokens - 16 * 512 < ramp.size(end) <= run.batch_tokens


def test_what_a_source_does_not_say_is_not_made_up():
    with pytest.raises(GuardError, match=r"PaLM.* does not say enough for a schedule"):
        PUBLISHED["palm-540b"].schedule(10**9)
    with pytest.raises(GuardError, match=r"BigScience.* does not say how many tokens"):
        PUBLISHED["bloom-176b"].ramp()
    assert PUBLISHED["bloom-176b"].schedule(410 * 10**9).peak == 6e-5
    for bad in (
        lambda: checkpoint_interval(0.0, 1.0),
        lambda: mean_time_between_failures(1, 0, 1, 1),
    ):
        with pytest.raises(GuardError, match="must be positive"):
            bad()
