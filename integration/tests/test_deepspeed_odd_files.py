"""Odd files of DeepSpeed's, which DeepSpeed itself takes in silence, say what is meant or wrong."""

from __future__ import annotations

import json

import pytest

from trainwright.integration.errors import ConfigError
from trainwright.integration.foreign_rates import foreign_rate


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR"])
def test_a_greatest_rate_of_zero_is_not_the_optimizers(kind: str) -> None:
    params = {"warmup_max_lr": 0, "warmup_num_steps": 2, "warmup_type": "linear"}
    if kind == "WarmupDecayLR":
        params["total_num_steps"] = 9
    schedule = foreign_rate(json.dumps({"type": kind, "params": params}))

    assert [schedule.at(update, lr=1.0, steps=9) for update in range(6)] == [0.0] * 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"type": "WarmupLR", "params": [1]}', "params must be an object, got [1]"),
        ('{"type": "WarmupLR", "params": null}', "params must be an object, got None"),
        ('{"type": "WarmupLR", "params": "x"}', "params must be an object, got 'x'"),
        (
            '{"type": "LRRangeTest", "params": {"lr_range_test_staircase": "yes"}}',
            "lr_range_test_staircase must be true or false, got 'yes'",
        ),
        (
            '{"type": "LRRangeTest", "params": {"lr_range_test_staircase": 1}}',
            "lr_range_test_staircase must be true or false, got 1",
        ),
    ],
)
def test_parameters_of_a_schedule_of_another_kind_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        foreign_rate(text)
    assert message in str(caught.value)
