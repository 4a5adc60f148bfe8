"""The rule that draws tokens: greedy, by temperature, the likeliest few, the likeliest share."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from trainwright.integration.errors import ConfigError
from trainwright.integration.sampling import Sampling

ROWS = torch.arange(2)


@given(
    temperature=st.floats(0.1, 3.0),
    top_k=st.none() | st.integers(1, 12),
    top_p=st.floats(0.05, 1.0),
    seed=st.integers(0, 2**31),
)
@example(temperature=1.0, top_k=1, top_p=0.05, seed=0)
def test_probabilities_are_those_of_the_likeliest_tokens_one_after_another(
    temperature: float, top_k: int | None, top_p: float, seed: int
) -> None:
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    wanted = torch.stack([_shares(row, temperature, top_k, top_p) for row in logits])

    found = Sampling(temperature, top_k, top_p).shares(logits)

    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)


def _shares(
    logits: torch.Tensor, temperature: float, top_k: int | None, top_p: float
) -> torch.Tensor:
    weights = [math.exp(float(logit) / temperature) for logit in logits]
    likeliest = sorted(range(len(weights)), key=lambda token: -weights[token])[:top_k]
    kept: list[int] = []
    while likeliest and sum(weights[token] for token in kept) < top_p * sum(
        weights[token] for token in [*kept, *likeliest]
    ):
        kept.append(likeliest.pop(0))
    total = sum(weights[token] for token in kept)
    return torch.tensor(
        [weight / total if token in kept else 0.0 for token, weight in enumerate(weights)],
        dtype=torch.float64,
    )


def test_tokens_come_as_often_as_they_should_and_banned_ones_never() -> None:
    logits = torch.tensor([0.7, 0.4, 0.1, 9.0]).log().expand(3000, -1)
    rule = Sampling(temperature=1.0, banned=frozenset({3}))

    drawn = rule.draw(logits, torch.arange(3000), 0)

    shares = torch.stack([(drawn == token).double().mean() for token in range(4)])
    # Four standard deviations of a share of 3,000 draws.
    assert (shares - torch.tensor([7, 4, 1, 0]) / 12).abs().max() < 4 * math.sqrt(0.25 / 3000)
    assert (drawn < 3).all()


def test_what_a_row_is_given_depends_on_seed_row_and_step_alone() -> None:
    logits = torch.zeros(1, 1000)
    rule = Sampling(temperature=1.0, seed=3)
    both = torch.stack([rule.draw(logits.expand(2, -1), ROWS, step) for step in range(20)])

    second = torch.stack([rule.draw(logits, ROWS[1:], step) for step in range(20)])

    assert torch.equal(both[:, 1:], second)
    assert not torch.equal(both[:, :1], second)
    other = Sampling(temperature=1.0, seed=4)
    assert not torch.equal(second[0], other.draw(logits, ROWS[1:], 0))


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1.0])
def test_logits_that_are_no_numbers_give_no_token(temperature: float) -> None:
    logits = torch.tensor([[1.0, math.nan, 3.0], [1.0, 3.0, 2.0], [1.0, math.inf, 0.0]])
    rule = Sampling(temperature, top_k=1)

    assert rule.draw(logits, torch.arange(3), 0).tolist() == [-1, 1, -1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"seed": -1},
    ],
)
def test_a_rule_that_draws_nothing_is_refused(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=name.replace("_", "-")):
        Sampling(**wrong)  # type: ignore[arg-type]
