"""All ranks come to one verdict, and nobody waits for a rank that left alone."""

import math
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import LocalWorld, ReduceOp, SingleCommunicator
from trainwright.stability_guards import (
    Agreement,
    GuardError,
    HaltError,
    LocalVerdictGuard,
    NonFiniteGuard,
    Report,
    Verdict,
    agree,
    any_of,
    clip_,
    report_from_totals,
    verdict_from_counts,
)


def totals(norm=2.0, non_finite=0.0, loss_sum=12.0, tokens=4.0, verdicts=(2, 0, 0, 0)):
    values = {"norm": norm, "non_finite": non_finite, "loss_sum": loss_sum, "tokens": tokens}
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    return SimpleNamespace(**tensors, verdicts=torch.tensor(verdicts, dtype=torch.float64))


@given(verdicts=st.lists(st.sampled_from(Verdict), min_size=1, max_size=5))
def test_all_ranks_take_the_greatest_verdict_and_know_who_asked_first(verdicts):
    def vote(communicator):
        return agree(verdicts[communicator.rank], communicator)

    agreements = LocalWorld(len(verdicts)).run(vote)

    greatest = max(verdicts)
    assert agreements == [Agreement(greatest, verdicts.index(greatest))] * len(verdicts)


def test_a_rank_alone_agrees_with_itself():
    assert agree(Verdict.SKIP, SingleCommunicator()) == Agreement(Verdict.SKIP, 0)


@given(verdicts=st.lists(st.sampled_from(Verdict), min_size=1, max_size=6))
def test_counts_of_verdicts_give_the_greatest(verdicts):
    counts = [float(sum(v is level for v in verdicts)) for level in Verdict]

    assert verdict_from_counts(counts) is max(verdicts)
    assert verdict_from_counts(torch.tensor(counts)) is max(verdicts)


def test_no_votes_let_the_step_continue_and_a_wrong_number_of_levels_is_refused():
    assert verdict_from_counts([0, 0, 0, 0]) is Verdict.CONTINUE
    with pytest.raises(GuardError, match=r"4 entries \(CONTINUE, SKIP, ROLLBACK, HALT\), got 3"):
        verdict_from_counts([1, 0, 0])


def test_a_report_holds_the_mean_loss_the_true_norm_and_the_greatest_verdict():
    report = report_from_totals(5, totals(norm=16.0, verdicts=(3, 1, 0, 0)), loss_scale=8.0)

    assert report == Report(
        step=5, loss=3.0, norm=2.0, non_finite=0, tokens=4, local_verdict=Verdict.SKIP
    )


def test_a_step_without_tokens_has_a_loss_and_is_skipped():
    report = report_from_totals(0, totals(norm=0.0, loss_sum=0.0, tokens=0.0))
    guard = NonFiniteGuard()

    assert report.loss == 0.0
    assert guard.update(guard.initial(), report)[1] is Verdict.SKIP


def local_loss(communicator, step, weight):
    loss = weight.square().sum() * (communicator.rank + 1)
    return loss * math.nan if communicator.rank == 1 and step == 2 else loss


def test_a_bad_loss_on_one_rank_is_skipped_by_all():
    def train(communicator):
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.01)
        skipped = []
        for step in range(4):
            optimizer.zero_grad()
            loss = local_loss(communicator, step, weight)
            mine = Verdict.CONTINUE if bool(loss.isfinite()) else Verdict.SKIP
            if agree(mine, communicator).verdict is not Verdict.CONTINUE:
                skipped.append(step)
                continue
            loss.backward()
            communicator.all_reduce(weight.grad).wait()
            optimizer.step()
        return skipped, weight.tolist()

    first, second = LocalWorld(2).run(train)

    assert first == second
    assert first[0] == [2]
    assert first[1][0] == pytest.approx((1 - 0.01 * 2 * 3) ** 3)


def test_a_bad_loss_on_one_rank_stops_all_within_seconds_and_is_named():
    def train(communicator):
        weight = nn.Parameter(torch.ones(3))
        for step in range(4):
            loss = local_loss(communicator, step, weight)
            mine = Verdict.CONTINUE if bool(loss.isfinite()) else Verdict.HALT
            try:
                agree(mine, communicator).raise_from(Verdict.HALT, f"bad loss at step {step}")
            except HaltError as error:
                return str(error)
            loss.backward()
            communicator.all_reduce(weight.grad).wait()
        return None

    began = time.monotonic()
    messages = LocalWorld(2).run(train)

    assert messages == ["rank 1 asks for HALT: bad loss at step 2"] * 2
    assert time.monotonic() - began < 5.0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_poisoned_step_over_ranks_changes_no_weight_and_reports_the_bad_norm(bad):
    def train(communicator):
        weight = nn.Parameter(torch.full((2,), 5.0))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        guard = any_of(LocalVerdictGuard(), NonFiniteGuard())
        weight.grad = torch.tensor([bad if communicator.rank == 1 else 1.0, 1.0])
        packed = torch.zeros(8, dtype=torch.float64)
        packed[0] = weight.grad.double().square().sum()
        packed[1] = float((~weight.grad.isfinite()).sum())
        packed[2:5] = torch.tensor([1.0, 2.0, 1.0])  # loss, tokens, one vote to continue
        communicator.all_reduce(packed, ReduceOp.SUM).wait()
        found = SimpleNamespace(
            norm=packed[0].sqrt(),
            non_finite=packed[1],
            loss_sum=packed[2],
            tokens=packed[3],
            verdicts=packed[4:],
        )
        report = report_from_totals(0, found)
        state, verdict = guard.update(guard.initial(), report)
        untouched = clip_([weight.grad], found.norm, 1.0)
        if verdict is Verdict.CONTINUE:
            optimizer.step()
        return verdict, bool(untouched), weight.tolist(), report.norm, guard.reason(state)

    results = LocalWorld(2).run(train)

    for verdict, untouched, weight, norm, reason in results:
        assert verdict is Verdict.SKIP
        assert untouched
        assert weight == [5.0, 5.0]
        assert math.isinf(norm) if math.isinf(bad) else math.isnan(norm)
        assert "1 gradient elements are not finite" in reason
