"""How many overflows the scale bears, as Megatron-LM and DeepSpeed count them."""

import json

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from trainwright.precision import DynamicLossScaler, Hysteresis, LossScaleError, PrecisionError

OPTIMIZER = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.0)


def iterate(scaler, overflows):
    scaler.unscale_(OPTIMIZER, non_finite=float(overflows))
    scaler.step(OPTIMIZER)
    scaler.update()


def scales(scaler, history):
    found = []
    for overflows in history:
        iterate(scaler, overflows)
        found.append(scaler.get_scale())
    return found


def scales_of_megatron(history, hysteresis, interval):
    """Overflows are counted down from the last growth; at zero and below each halves the scale."""
    scale, clean, left, found = 2.0**20, 0, hysteresis, []
    for overflows in history:
        clean = 0 if overflows else clean + 1
        left -= overflows
        if overflows and left <= 0:
            scale /= 2
        if clean == interval:
            scale, clean, left = scale * 2, 0, hysteresis
        found.append(scale)
    return found


def scales_of_deepspeed(history, hysteresis, consecutive):
    """Rules a and b of its scaler, over histories too short to grow."""
    scale, left, found = 2.0**20, hysteresis, []
    for overflows in history:
        if overflows and left > 1:
            left -= 1
        elif overflows:
            scale /= 2
        elif consecutive:
            left = hysteresis
        found.append(scale)
    return found


HISTORIES = st.lists(st.booleans(), max_size=18)


@given(history=HISTORIES, hysteresis=st.integers(1, 4), interval=st.integers(1, 4))
@example(history=[1, 0, 1, 1, 0, 0, 1, 1], hysteresis=2, interval=2)
def test_a_number_counts_overflows_since_the_last_growth_as_megatron_does(
    history, hysteresis, interval
):
    scaler = DynamicLossScaler(2.0**20, growth_interval=interval, hysteresis=hysteresis)

    assert scales(scaler, history) == scales_of_megatron(history, hysteresis, interval)


@given(history=HISTORIES, hysteresis=st.integers(1, 4), consecutive=st.booleans())
@example(history=[1, 0, 1, 1, 1], hysteresis=2, consecutive=True)
@example(history=[1, 0, 1, 1, 1], hysteresis=2, consecutive=False)
def test_refilling_at_clean_steps_counts_overflows_in_a_row_as_deepspeed_does(
    history, hysteresis, consecutive
):
    scaler = DynamicLossScaler(2.0**20, hysteresis=Hysteresis(hysteresis, refills=consecutive))

    assert scales(scaler, history) == scales_of_deepspeed(history, hysteresis, consecutive)


@given(history=HISTORIES, cut=st.integers(0, 18), refills=st.booleans())
def test_a_restart_forgets_no_overflow(history, cut, refills):
    through = DynamicLossScaler(
        2.0**20, growth_interval=3, hysteresis=Hysteresis(3, refills=refills)
    )
    before = DynamicLossScaler(2.0**20, growth_interval=3, hysteresis=Hysteresis(3, refills))
    scales(before, history[:cut])

    resumed = DynamicLossScaler()
    resumed.load_state_dict(json.loads(json.dumps(before.state_dict())))

    assert scales(through, history)[cut:] == scales(resumed, history[cut:])
    assert resumed.state_dict() == through.state_dict()


def test_a_step_is_skipped_though_the_scale_stays():
    scaler = DynamicLossScaler(1.0, hysteresis=2)

    iterate(scaler, True)

    assert (scaler.num_skipped, scaler.get_scale()) == (1, 1.0)
    with pytest.raises(LossScaleError, match=r"from 1\.0 to 0\.5"):
        iterate(scaler, True)


def test_the_state_of_torchs_scaler_leaves_the_hysteresis_as_it_was_made():
    scaler = DynamicLossScaler(8.0, hysteresis=2)
    theirs = torch.amp.GradScaler("cpu", 64.0)
    state = {**theirs.state_dict(), "scale": 64.0, "_growth_tracker": 0}

    scaler.load_state_dict(state)

    assert scales(scaler, [True, True]) == [64.0, 32.0]


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True])
def test_a_hysteresis_that_is_no_count_is_refused(wrong):
    with pytest.raises(PrecisionError, match="hysteresis must be a whole number from 1"):
        DynamicLossScaler(hysteresis=wrong)
    scaler = DynamicLossScaler(hysteresis=2)
    before = scaler.state_dict()
    with pytest.raises(PrecisionError, match="hysteresis must be"):
        scaler.load_state_dict({**before, "hysteresis": wrong})
    assert scaler.state_dict() == before


def test_refills_that_is_no_bool_is_refused():
    with pytest.raises(PrecisionError, match="refills must be True or False"):
        Hysteresis(2, refills=1)
