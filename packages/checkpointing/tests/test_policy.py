"""Policies are values, and their names are checked."""

import pytest

from trainwright.checkpointing.activations import (
    HostMemory,
    Offload,
    compose,
    hold_by,
    keep_all,
    parse_policy,
    recompute_all,
    recompute_every,
    recompute_sqrt,
    selective,
    within_budget,
)
from trainwright.checkpointing.errors import PolicyError
from trainwright.collectives.codec import BlockInt8


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("none", keep_all()),
        ("full", recompute_all()),
        ("every-1", recompute_all()),
        ("every-4", recompute_every(4)),
        ("sqrt", recompute_sqrt()),
        ("selective", selective()),
    ],
)
def test_a_policy_is_the_value_that_its_name_says(text, policy):
    assert parse_policy(text) == policy


def test_options_reach_the_parsed_policy():
    policy = parse_policy("every-2", early_stop=False, preserve_rng_state=False)
    assert policy == recompute_every(2, early_stop=False, preserve_rng_state=False)
    assert policy != recompute_every(2)
    assert "num_layers=2" in repr(policy)


@pytest.mark.parametrize("text", ["fulll", "every", "every-", "every-²", "", "every-4 "])
def test_an_unknown_name_is_refused_with_the_names_there_are(text):
    with pytest.raises(PolicyError, match="none, full, every-K"):
        parse_policy(text)


def test_a_misspelt_name_is_refused_with_the_nearest():
    with pytest.raises(PolicyError, match="did you mean 'full'"):
        parse_policy("ful")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("budget:100", 100),
        ("budget:100B", 100),
        ("budget:3KB", 3000),
        ("budget:2MiB", 2 << 20),
        ("budget:1GiB", 1 << 30),
    ],
)
def test_a_budget_is_a_number_of_bytes_with_or_without_a_unit(text, num_bytes):
    assert parse_policy(text) == within_budget(num_bytes)


@pytest.mark.parametrize("text", ["budget", "budget:", "budget:1.5GiB", "budget:-1", "budget:1Q"])
def test_a_budget_that_is_no_number_of_bytes_is_refused(text):
    with pytest.raises(PolicyError, match="budget:BYTES"):
        parse_policy(text)


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(PolicyError, match="at least 1, got 0"):
        parse_policy("budget:0")


def test_offloading_and_compression_compose_with_any_policy(tmp_path):
    assert compose(selective()) == selective()
    held = compose(selective(), offload="cpu", compress="int8")
    assert held.runner == selective()
    assert held.keeper.codec == BlockInt8()
    assert isinstance(held.keeper.then.storage, HostMemory)
    folder = compose(keep_all(), offload=str(tmp_path)).keeper
    assert folder.storage.folder == tmp_path


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"compress": "int4"}, "int8, fp8 or bf16, got 'int4'"),
        ({"offload": "/nowhere/at/all"}, "no folder that can be written to"),
        ({"offload": ""}, "'cpu' or a folder"),
    ],
)
def test_codecs_and_folders_that_there_are_not_are_refused(options, rule):
    with pytest.raises(PolicyError, match=rule):
        compose(keep_all(), **options)


@pytest.mark.parametrize("keeper", [None, "cpu", Offload, 3])
def test_only_a_keeper_can_hold_what_a_policy_keeps(keeper):
    with pytest.raises(PolicyError, match="expected a keeper"):
        hold_by(keep_all(), keeper)


@pytest.mark.parametrize("number", [0, -1, 1.5, "2", True])
def test_the_number_of_layers_must_be_a_positive_integer(number):
    with pytest.raises(PolicyError, match="at least 1"):
        recompute_every(number)


def test_parsing_every_zero_is_refused():
    with pytest.raises(PolicyError, match="at least 1"):
        parse_policy("every-0")
