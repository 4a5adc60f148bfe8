"""Snapshots in memory put everything back bit for bit, and say what they take."""

import pytest
import torch
from torch import nn

from trainwright.collectives import LocalWorld
from trainwright.stability_guards import (
    GuardError,
    MemorySnapshots,
    Report,
    Snapshot,
    attention_logit_bound,
    bytes_of,
    largest_logit,
    report_from_totals,
    update_ratio,
)
from trainwright.stability_guards.testing import law_a_snapshot_puts_everything_back


def parts(kind=torch.optim.AdamW):
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return model, optimizer, scheduler


def train(model, optimizer, scheduler, steps):
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((1, 3), float(step))).sum().backward()
        optimizer.step()
        scheduler.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("before", [0, 2])
def test_training_after_going_back_is_training_from_there_however_often(before):
    model, optimizer, scheduler = parts()
    train(model, optimizer, scheduler, before)
    named = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    snapshots = MemorySnapshots(named)

    snapshots.take(before)
    once = train(model, optimizer, scheduler, 3)
    again = []
    for _ in range(2):
        snapshots.restore(before)
        again.append(train(model, optimizer, scheduler, 3))

    assert isinstance(snapshots, Snapshot)
    for other in again:
        assert all(torch.equal(a, b) for a, b in zip(once, other, strict=True))


def test_a_memory_snapshot_keeps_the_law():
    model, optimizer, scheduler = parts(torch.optim.SGD)

    law_a_snapshot_puts_everything_back(
        MemorySnapshots({"model": model, "optimizer": optimizer, "scheduler": scheduler}),
        change=lambda: train(model, optimizer, scheduler, 2),
        read=lambda: (
            [p.tolist() for p in model.parameters()],
            scheduler.state_dict(),
            optimizer.param_groups[0]["lr"],
        ),
    )


def test_the_oldest_goes_and_later_ones_are_forgotten_with_going_back():
    snapshots = MemorySnapshots({"model": nn.Linear(2, 2)}, keep=2)
    for step in (0, 5, 10):
        snapshots.take(step)
    assert snapshots.steps == (5, 10)

    snapshots.restore(5)

    assert snapshots.steps == (5,)
    snapshots.take(5)
    assert snapshots.steps == (5,)
    with pytest.raises(GuardError, match=r"no snapshot of step 10, only of \[5\]"):
        snapshots.restore(10)


def test_bytes_are_stated_before_and_after_and_tied_weights_count_once():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    snapshots = MemorySnapshots({"model": model}, keep=3)
    assert (snapshots.bytes, snapshots.needed_bytes) == (0, 3 * 2 * 256)

    snapshots.take(0)

    assert snapshots.bytes == 2 * 256
    tied = torch.ones(4)
    assert bytes_of({"a": [tied, (tied,)], "b": 3}) == 16


def test_weights_that_a_module_has_tied_are_kept_once_and_stay_tied():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    snapshots = MemorySnapshots({"model": model})
    before = model[0].weight.detach().clone()

    snapshots.take(0)
    model[0].weight.data.zero_()
    snapshots.restore(0)

    assert snapshots.bytes == 4 * 9
    assert model[1].weight is model[0].weight
    assert torch.equal(model[0].weight, before)


def test_more_than_the_budget_is_refused_and_nothing_is_lost():
    snapshots = MemorySnapshots({"model": nn.Linear(8, 8, bias=False)}, keep=2, budget_bytes=300)
    snapshots.take(0)

    with pytest.raises(GuardError, match=r"would take 512 bytes, more than budget_bytes=300"):
        snapshots.take(1)

    assert snapshots.steps == (0,)
    with pytest.raises(GuardError, match="keep must be at least 1, got 0"):
        MemorySnapshots({}, keep=0)


def test_a_budget_that_one_rank_exceeds_is_refused_on_every_rank():
    def take(communicator):
        model = nn.Linear(8, 8 if communicator.rank == 1 else 2, bias=False)
        snapshots = MemorySnapshots(
            {"model": model}, keep=2, budget_bytes=300, communicator=communicator
        )
        snapshots.take(0)
        with pytest.raises(GuardError, match="would take 512 bytes, more than budget_bytes=300"):
            snapshots.take(1)
        return snapshots.steps

    assert LocalWorld(2).run(take) == [(0,), (0,)]


def test_the_update_ratio_is_the_largest_over_tensors_whole_or_cut():
    before = [torch.full((4,), 2.0), torch.full((2,), 1.0), torch.zeros(2)]
    after = [torch.full((4,), 2.2), torch.full((2,), 1.05), torch.ones(2)]

    whole = update_ratio(before, after)
    cut = LocalWorld(2).run(
        lambda comm: float(
            update_ratio(
                [t.chunk(2)[comm.rank] for t in before],
                [t.chunk(2)[comm.rank] for t in after],
                comm,
            )
        )
    )

    assert float(whole) == pytest.approx(0.1)
    assert cut == pytest.approx([float(whole)] * 2)
    assert update_ratio([], []) == 0
    with pytest.raises(GuardError, match="must hold the same shapes"):
        update_ratio(before, after[:1])


@pytest.mark.parametrize("place", [0, 1], ids=["weight", "update"])
def test_the_update_ratio_of_what_is_not_finite_is_nan(place):
    tensors = [[torch.ones(2), torch.ones(2)], [torch.ones(2), torch.ones(2)]]
    tensors[place][0][0] = torch.nan

    assert update_ratio(*tensors).isnan()


def test_no_attention_logit_exceeds_its_bound_and_the_largest_logit_is_found_over_ranks():
    q, k = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8)
    logits = q @ k.repeat_interleave(2, dim=1).transpose(-1, -2) * 8**-0.5

    bound = attention_logit_bound(q, k)

    assert logits.abs().max() <= bound <= 10 * logits.abs().max()
    parts = LocalWorld(2).run(lambda comm: float(largest_logit(logits.chunk(2)[comm.rank], comm)))
    assert parts == [float(logits.abs().max())] * 2
    assert largest_logit(torch.zeros(0)) == 0
    with pytest.raises(GuardError, match="3 query heads of width 8 cannot share 2 key heads"):
        attention_logit_bound(q[:, :3], k)


def test_signals_come_with_the_one_wait_for_the_totals():
    class Totals:
        norm, non_finite, tokens = torch.tensor(2.0), torch.tensor(0.0), torch.tensor(4.0)
        loss_sum, verdicts = torch.tensor(8.0), torch.tensor([2.0, 0, 0, 0])

    signals = {"logit_max": torch.tensor(3.5), "lr": 0.25}

    report = report_from_totals(3, Totals(), signals=signals)

    assert report == Report(3, loss=2.0, norm=2.0, tokens=4, signals={"logit_max": 3.5, "lr": 0.25})
