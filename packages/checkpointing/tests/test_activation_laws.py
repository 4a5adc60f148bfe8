"""Every activation policy computes what keeping all activations computes."""

import functools
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainwright.checkpointing.activations import (
    hold_by,
    keep_all,
    offload_to_cpu,
    parse_policy,
    recompute_all,
    recompute_every,
    recompute_except,
    recompute_sqrt,
    selective,
)
from trainwright.checkpointing.testing.runners import (
    LAYER_RUNNER_LAWS,
    SampleLayer,
    live_saved_bytes,
)
from trainwright.collectives import LocalWorld, ReduceOp
from trainwright.collectives.differentiable import partial_to_replicate, replicate_to_partial
from trainwright.collectives.random import Key, bernoulli

POLICIES = {
    "none": keep_all(),
    "full": recompute_all(),
    "every 2": recompute_every(2),
    "every 3 to the end": recompute_every(3, early_stop=False),
    "sqrt, verified": recompute_sqrt(verify=True),
    "selective": selective(),
    "gelu and norms kept": recompute_except(["gelu", "layer_norm"]),
    "offloaded": hold_by(keep_all(), offload_to_cpu()),
    "selective, offloaded": hold_by(selective(), offload_to_cpu()),
    "budget": parse_policy("budget:1300"),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("law", LAYER_RUNNER_LAWS, ids=lambda law: law.__name__)
@settings(max_examples=4)
@given(num_layers=st.integers(1, 5), seed=st.integers(0, 2**31))
def test_every_policy_obeys_every_law(law, policy, num_layers, seed):
    law(policy, num_layers, seed)


@given(num_layers=st.integers(1, 12), every=st.integers(1, 12))
def test_recomputing_every_k_layers_keeps_one_input_a_segment(num_layers, every):
    layers = nn.ModuleList([nn.Sequential(nn.Tanh(), nn.Linear(8, 8)) for _ in range(num_layers)])
    hidden = torch.randn(16, 8, requires_grad=True)

    kept = live_saved_bytes(lambda: recompute_every(every)(layers, hidden), [*layers.parameters()])

    num_segments = -(-num_layers // every)
    assert kept == num_segments * hidden.numel() * hidden.element_size()


def test_the_coarser_the_policy_the_less_is_kept():
    torch.manual_seed(0)
    layers = nn.ModuleList([SampleLayer(8) for _ in range(6)])
    hidden = torch.randn(16, 8, requires_grad=True)
    extra = {"bias": torch.zeros(8)}
    scale = torch.ones(())

    none, full, every3 = (
        live_saved_bytes(
            lambda policy=policy: policy(layers, hidden, extra, scale=scale),
            [*layers.parameters(), extra["bias"], scale],
        )
        for policy in (keep_all(), recompute_all(), recompute_every(3))
    )

    assert every3 < full < none / 4


def test_no_layers_return_the_input():
    hidden = torch.ones(2)
    assert recompute_all()([], hidden) is hidden
    assert keep_all()([], hidden) is hidden


class PlacedLayer(nn.Module):
    """A tensor-parallel layer: weights cut over the ranks, dropout drawn by place."""

    def __init__(self, comm, index):
        super().__init__()
        generator = torch.Generator().manual_seed(index)
        weight = torch.randn(4, 4, generator=generator) / 2
        self.weight = nn.Parameter(weight.chunk(comm.size, 0)[comm.rank].clone())
        self.back = nn.Parameter(weight.chunk(comm.size, 1)[comm.rank].clone())
        self.comm = comm
        self.key = Key(3, f"dropout {index}")

    def forward(self, hidden, *, microbatch):
        inner = torch.tanh(replicate_to_partial(hidden, self.comm) @ self.weight.T)
        out = partial_to_replicate(inner @ self.back.T, self.comm)
        key = Key(self.key.seed, self.key.name, microbatch)
        mask = bernoulli(key, out.shape, 0.75, dtype=out.dtype, device=out.device)
        return hidden + out * mask / 0.75


def _train_placed(comm, policy):
    layers = [PlacedLayer(comm, index) for index in range(3)]
    inputs = [torch.full((2, 4), 0.1 * (m + 1), requires_grad=True) for m in range(3)]
    outputs = [policy(layers, x, microbatch=m) for m, x in enumerate(inputs)]
    for m in (1, 0, 2):
        outputs[m].square().sum().backward()
    found = [o.detach() for o in outputs] + [x.grad for x in inputs]
    return found + [p.grad for layer in layers for p in layer.parameters()]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_rank_threads_recompute_placed_dropout_and_collectives_bitwise(world):
    plain = LocalWorld(world).run(_train_placed, keep_all())
    policies = [recompute_all(), recompute_every(2), parse_policy("budget:100KB"), selective()]
    policies += [hold_by(selective(), offload_to_cpu()), hold_by(keep_all(), offload_to_cpu())]
    for policy in policies:
        recomputed = LocalWorld(world).run(_train_placed, policy)
        for expected, found in zip(plain, recomputed, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


class _Talking(nn.Module):
    """A layer whose width is its rank's own, and whose output all ranks add up."""

    def __init__(self, width, comm):
        super().__init__()
        self.inner = nn.Linear(8, width)
        self.outer = nn.Linear(width, 8)
        self.comm = comm

    def forward(self, hidden):
        entered = replicate_to_partial(hidden, self.comm)
        return partial_to_replicate(self.outer(self.inner(entered).tanh()), self.comm)


def test_ranks_with_unequal_layers_that_communicate_agree_on_one_plan_within_a_budget():
    def greatest(comm, counts):
        tensor = torch.tensor(counts)
        comm.all_reduce(tensor, ReduceOp.MAX).wait()
        return tensor.tolist()

    def work(comm):
        layers = [_Talking(8 if comm.rank == 0 else 64, comm) for _ in range(4)]
        policy = parse_policy("budget:3000", agree=functools.partial(greatest, comm))
        for _ in range(2):
            policy(layers, torch.randn(4, 8, requires_grad=True)).sum().backward()
        (plan,) = policy.plans()
        return str(plan)

    narrow, wide = LocalWorld(2, timeout_s=20.0).run(work)

    assert narrow == wide


def test_layers_that_draw_nothing_never_write_the_shared_generator(monkeypatch):
    def refuse(*args):
        raise AssertionError("the generator that all threads share was written")

    monkeypatch.setattr(torch, "set_rng_state", refuse)
    monkeypatch.setattr(torch.random, "set_rng_state", refuse)
    before = torch.get_rng_state()

    LocalWorld(4).run(_train_placed, recompute_all())

    assert torch.equal(before, torch.get_rng_state())


def test_a_thread_that_draws_sees_its_numbers_while_others_recompute():
    torch.manual_seed(7)
    expected = [float(torch.rand(())) for _ in range(300)]
    torch.manual_seed(7)
    numbers = []

    def draw():
        numbers.extend(float(torch.rand(())) for _ in range(300))

    thread = threading.Thread(target=draw)
    policy = recompute_all(preserve_rng_state=False)

    thread.start()
    LocalWorld(2).run(_train_placed, policy)
    thread.join(30)

    assert numbers == expected
