"""Policies are values, and their names are checked."""

import pytest

from trainwright.checkpointing.activations import (
    keep_all,
    parse_policy,
    recompute_all,
    recompute_every,
    recompute_sqrt,
    selective,
)
from trainwright.checkpointing.errors import NotAvailableYetError, PolicyError


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


@pytest.mark.parametrize("text", ["budget:100"])
def test_planned_policies_say_that_they_are_not_available_yet(text):
    with pytest.raises(NotAvailableYetError, match="not available yet"):
        parse_policy(text)


@pytest.mark.parametrize("number", [0, -1, 1.5, "2", True])
def test_the_number_of_layers_must_be_a_positive_integer(number):
    with pytest.raises(PolicyError, match="at least 1"):
        recompute_every(number)


def test_parsing_every_zero_is_refused():
    with pytest.raises(PolicyError, match="at least 1"):
        parse_policy("every-0")
