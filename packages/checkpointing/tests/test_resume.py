"""A resumed run goes on as if it had never stopped."""

from pathlib import Path

import pytest
import torch
from torch import nn

from trainwright.checkpointing.state import Sharded, StateStore
from trainwright.checkpointing.testing.files import CrashingFiles
from trainwright.collectives import LocalWorld, ShardSpec

ROOT = Path("/runs/a")
NUM_STEPS = 6


class Trainer:
    """AdamW with warm-up and decay, dropout from a generator of its own, on random data."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1.0)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / 3) * 0.1 * 0.9**step
        )
        self.data = torch.Generator().manual_seed(5)
        self.rates = []
        self._make_moments()

    def _make_moments(self):
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with torch.no_grad():
            before = [parameter.clone() for parameter in self.model.parameters()]
            self.optimizer.step()
            for parameter, value in zip(self.model.parameters(), before, strict=True):
                parameter.copy_(value)
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()

    def step(self):
        x = torch.randn(16, 4, generator=self.data)
        keep = torch.rand(16, 4, generator=self.data) < 0.8
        self.optimizer.zero_grad()
        (self.model(x * keep) - x.sum(1, keepdim=True)).square().mean().backward()
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.schedule.step()

    def tree(self, generator_state=None):
        names = dict(self.model.named_parameters())
        return {
            "model": names,
            "moments": {name: dict(self.optimizer.state[p]) for name, p in names.items()},
            "schedule": {"last_epoch": self.schedule.last_epoch},
            "lr": self.optimizer.param_groups[0]["lr"],
            "generator": self.data.get_state() if generator_state is None else generator_state,
        }

    def resume(self, store):
        state = torch.zeros_like(self.data.get_state())
        loaded = store.load(self.tree(state))
        self.data.set_state(state)
        self.schedule.last_epoch = loaded["schedule"]["last_epoch"]
        self.optimizer.param_groups[0]["lr"] = loaded["lr"]


@pytest.mark.parametrize("stop", range(NUM_STEPS + 1))
def test_a_run_resumed_after_any_step_equals_one_that_never_stopped(stop):
    whole = Trainer(seed=0)
    for _ in range(NUM_STEPS):
        whole.step()
    files = CrashingFiles()

    first = Trainer(seed=0)
    for _ in range(stop):
        first.step()
    StateStore(ROOT, files=files).save(stop, first.tree())
    second = Trainer(seed=99)
    second.resume(StateStore(ROOT, files=files))
    for _ in range(NUM_STEPS - stop):
        second.step()

    assert first.rates + second.rates == whole.rates
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, dict(second.model.named_parameters())[name])


def _shard(comm):
    return ShardSpec.full("flat", (10,)).narrow(
        10 * comm.rank // comm.size, 10 * (comm.rank + 1) // comm.size
    )


def _adam(comm, files, *, resume, num_steps, save):
    """Optimize a flat vector whose elements are cut over the ranks, moments too."""
    spec = _shard(comm)
    target = torch.arange(10.0)[spec.start : spec.stop]
    weight = torch.full((spec.numel,), 0.5 if resume else 1.0, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=0.1)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    state = optimizer.state[weight]
    with torch.no_grad():
        weight.fill_(1.0)
        for tensor in state.values():
            tensor.zero_()
    tree = {
        "weight": Sharded(weight, spec),
        "exp_avg": Sharded(state["exp_avg"], spec),
        "exp_avg_sq": Sharded(state["exp_avg_sq"], spec),
        "step": state["step"],
    }
    store = StateStore(ROOT, comm, files=files)
    if resume:
        store.load(tree)
    for _ in range(num_steps):
        weight.grad = weight.detach() - target
        optimizer.step()
    if save:
        store.save(num_steps, tree)
    return weight.detach()


@pytest.mark.parametrize("after", [1, 2, 3])
def test_masters_and_moments_resume_on_any_number_of_ranks(after):
    files = CrashingFiles()
    options = {"resume": False, "save": False}
    whole = LocalWorld(1).run(lambda comm: _adam(comm, files, num_steps=4, **options))[0]

    LocalWorld(2).run(lambda comm: _adam(comm, files, resume=False, num_steps=3, save=True))
    resumed = LocalWorld(after).run(
        lambda comm: _adam(comm, files, resume=True, num_steps=1, save=False)
    )

    assert torch.equal(torch.cat(resumed), whole)


def test_more_files_than_may_be_open_at_once_are_loaded():
    files = CrashingFiles()
    num_ranks = 40
    whole = torch.arange(float(num_ranks))

    def save(comm):
        spec = ShardSpec.full("w", (num_ranks,)).narrow(comm.rank, comm.rank + 1)
        StateStore(ROOT, comm, files=files).save(1, {"w": Sharded(spec.extract(whole), spec)})

    LocalWorld(num_ranks).run(save)
    target = torch.zeros(num_ranks)
    StateStore(ROOT, files=files).load({"w": target})

    assert torch.equal(target, whole)
