"""Poisoned batches in a real run over ranks: it recovers, and ends as if they had never been."""

import math

import pytest
import torch
from torch import nn

from trainwright.collectives import LocalWorld
from trainwright.stability_guards import (
    MemoryJournal,
    MemorySnapshots,
    NonFiniteGuard,
    Positions,
    Recovery,
    RecoveryPlan,
    Report,
    SpikeGuard,
    Verdict,
    agreeing,
    any_of,
    as_lambda_lr,
    linear,
    replay,
)
from trainwright.stability_guards.testing import law_a_source_yields_in_order_what_is_not_left_out

NONE = Positions()
SEQUENCES = 4  # of a batch
STEPS = 24


class Reader:
    """Each rank takes its share of a batch of sequences, of which some are poisoned."""

    def __init__(self, communicator, poison):
        self.position, self.last, self._left_out = 0, NONE, NONE
        self._comm, self._poison = communicator, poison

    def seek(self, position, left_out):
        self.position, self._left_out = position, left_out

    def next_batch(self):
        self.last, self.position = self._left_out.draw(self.position, SEQUENCES)
        ids = [at for span in self.last.spans for at in range(*span)]
        rows = [self._sequence(at) for at in ids[self._comm.rank :: self._comm.size]]
        return torch.stack(rows)

    def _sequence(self, at):
        values = torch.randn(5, generator=torch.Generator().manual_seed(at))
        return values * self._poison.get(at, 1.0)


def guard():
    small = {"window": 16, "min_history": 4}
    spikes = [SpikeGuard(signal, 20.0, **small) for signal in ("loss", "norm")]
    return any_of(NonFiniteGuard(), agreeing(*spikes))


def train(communicator, poison, exclude):
    model = nn.Linear(5, 1)
    # Ranks are threads, which share the global generator: nothing may be drawn from it.
    model.load_state_dict({"weight": torch.linspace(-0.5, 0.5, 5)[None], "bias": torch.zeros(1)})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    factor = as_lambda_lr(linear(peak=0.05, warmup_steps=3, total_steps=60))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    reader, journal = Reader(communicator, poison), MemoryJournal()
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    plan = RecoveryPlan(snapshot_every=5, skip_before=1)
    recovery = Recovery(guard(), MemorySnapshots(parts), reader, journal, plan, exclude)
    recovery.begin(0)
    step = 0
    while scheduler.last_epoch < STEPS:
        x = reader.next_batch()
        loss = (model(x).squeeze(-1) - x.sum(1)).square().sum() / SEQUENCES
        optimizer.zero_grad()
        loss.backward()
        flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()] + [loss.detach()[None]])
        communicator.all_reduce(flat).wait()
        for p, g in zip(model.parameters(), flat[:-1].split([5, 1]), strict=True):
            p.grad.copy_(g.view_as(p))
        report = Report(step, loss=flat[-1].item(), norm=flat[:-1].norm().item())
        verdict = recovery.judge(report, scheduler.last_epoch)
        if verdict is Verdict.CONTINUE:
            optimizer.step()
            scheduler.step()
        if verdict is Verdict.ROLLBACK:
            step = journal.entries[-1].back_to
            continue
        step += 1
        recovery.stepped(step, verdict)
    return [p.tolist() for p in model.parameters()], journal.entries, recovery.left_out


@pytest.mark.parametrize(
    ("poison", "verdict", "gone"),
    [
        ({50: math.nan}, Verdict.SKIP, "48-51"),
        ({50: math.inf, 51: math.nan}, Verdict.SKIP, "48-51"),
        ({50: 1e4}, Verdict.ROLLBACK, "44-51"),
        ({50: 1e4, 81: 1e4}, Verdict.ROLLBACK, "44-51, 76-83"),
    ],
    ids=["nan", "inf", "explosion", "two explosions"],
)
def test_a_poisoned_run_ends_bit_for_bit_as_one_whose_reader_never_yields_it(poison, verdict, gone):
    world = LocalWorld(2)

    recovered = world.run(train, poison, NONE)
    clean = world.run(train, {}, recovered[0][2])

    assert recovered[0] == recovered[1]
    weights, entries, left_out = recovered[0]
    assert {entry.verdict for entry in entries} == {verdict}
    assert str(left_out) == gone
    assert weights == clean[0][0]
    assert clean[0][1] == ()


def test_the_reader_keeps_the_law():
    reader = Reader(LocalWorld(1).run(lambda comm: comm)[0], {})
    for start, left_out in ((0, NONE), (3, Positions([(4, 9), (11, 12)]))):
        law_a_source_yields_in_order_what_is_not_left_out(
            reader, reader.next_batch, start, left_out
        )


def test_a_curve_of_a_run_can_be_replayed():
    reports = [Report(at, loss=2.0, norm=1.0) for at in range(9)]

    assert replay([*reports, Report(9, loss=99.0, norm=99.0)], guard())[0].step == 9
