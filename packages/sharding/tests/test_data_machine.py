"""Any order of calls: each does what a model of a few dictionaries says, or is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from trainwright.collectives import SingleCommunicator, Work
from trainwright.collectives.works import DONE
from trainwright.sharding.data import LifecycleError, ShardPolicy, by_class
from trainwright.sharding.data.testing import wrap_on
from trainwright.sharding.mesh import Mesh, MeshShape

NAMES = ("a", "b", "c")
REDUCTION_ORDER = ("c", "b", "a")  # one bucket each, last registered first
values = st.sampled_from([-2.0, 0.5, 1.0, 3.0])


class SilentPeer:
    """Rank 0 of two, the other of which adds zeros and keeps the padding."""

    rank, size, name, device = 0, 2, "silent", torch.device("cpu")

    def all_reduce(self, tensor: torch.Tensor, op: object = None) -> Work:
        return DONE

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        return DONE

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        output.copy_(input[: output.numel()])
        return DONE

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        output[: input.numel()].copy_(input)
        output[input.numel() :].zero_()
        return DONE

    def split(self, color: int | None, key: int = 0) -> SilentPeer:
        return self


class Held(nn.Module):
    """One number, a unit of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros((), dtype=dtype))


class LifecycleMachine(RuleBasedStateMachine):
    """One rank's step; expected values are plain numbers, all exact in bfloat16."""

    @initialize(
        stage=st.sampled_from([0, 1, 2, 3]),
        dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
        alone=st.booleans(),
    )
    def make(self, stage: int, dtype: torch.dtype, alone: bool) -> None:
        self.model = nn.ModuleDict({name: Held(dtype) for name in NAMES})
        world = SingleCommunicator() if alone else SilentPeer()
        mesh = Mesh(world, MeshShape(dp=world.size))
        policy = ShardPolicy(stage=stage, units=by_class(Held), bucket_bytes=1, alignment=1)
        self.parallel = wrap_on(mesh, self.model, policy)
        self.is_cut = stage == 3 and not alone
        pieces = self.parallel.pieces
        self.pieces = {name: pieces[f"{name}.value"].parameter for name in NAMES}
        self.optimizer = torch.optim.SGD(self.pieces.values(), lr=1.0)
        self.masters = dict.fromkeys(NAMES, 0.0)
        self.published = dict(self.masters)
        self.unpublished = False
        self.expects_update = False
        self.begin_step()

    def weight(self, name: str) -> nn.Parameter:
        held = self.model[name]
        assert isinstance(held, Held)
        return held.value

    def begin_step(self) -> None:
        self.phase = "accumulating"
        self.armed = False
        self.touched = False
        self.gradients = dict.fromkeys(NAMES, 0.0)
        self.complete: set[str] = set()

    @property
    def started(self) -> set[str]:
        """The buckets whose reduction has begun: the complete ones up to the first that is not."""
        if self.phase != "accumulating":
            return set(NAMES)
        first = next((i for i, name in enumerate(REDUCTION_ORDER) if name not in self.complete), 3)
        return set(REDUCTION_ORDER[:first])

    @property
    def in_flight(self) -> bool:
        return self.phase == "reducing" or (self.phase == "accumulating" and bool(self.started))

    @property
    def unreduced(self) -> bool:
        return self.phase == "accumulating" and self.touched

    @rule(name=st.sampled_from(NAMES), factor=values)
    def backward(self, name: str, factor: float) -> None:
        loss = self.weight(name) * factor
        if name in self.started:
            with pytest.raises(LifecycleError, match="arrived"):
                loss.backward()
            self.recover()
            return
        loss.backward()
        self.gradients[name] += factor
        self.touched = True
        if self.armed:
            self.complete.add(name)

    def recover(self) -> None:
        """After a refusal the way out is to end the step without using it."""
        self.parallel.reduce()
        self.parallel.wait()
        self.publish_again()
        self.parallel.zero_grad()
        self.begin_step()

    def publish_again(self) -> None:
        if self.unpublished:
            self.parallel.publish()
            self.parallel.await_weights()
            self.published = dict(self.masters)
            self.unpublished = False
            self.expects_update = False

    @rule()
    def last_backward(self) -> None:
        if self.phase != "accumulating":
            with pytest.raises(LifecycleError, match="last_backward"):
                self.parallel.last_backward()
            return
        self.parallel.last_backward()
        self.armed = True

    @precondition(lambda self: self.phase == "accumulating" and not self.started)
    @rule()
    def zero_grad_of_the_module(self) -> None:
        self.model.zero_grad()
        self.gradients = dict.fromkeys(NAMES, 0.0)

    @precondition(lambda self: self.phase == "accumulating" and not self.started)
    @rule(name=st.sampled_from(NAMES), value=values)
    def write_by_hand(self, name: str, value: float) -> None:
        parameter = self.weight(name)
        parameter.grad = torch.full_like(parameter, value)
        self.gradients[name] = value

    @rule()
    def reduce(self) -> None:
        self.parallel.reduce()
        if self.phase == "accumulating":
            self.phase = "reducing"

    @rule()
    def wait(self) -> None:
        if self.phase == "accumulating":
            with pytest.raises(LifecycleError, match=r"wait\(\) before reduce"):
                self.parallel.wait()
            return
        self.parallel.wait()
        self.expects_update |= self.phase == "reducing"
        self.phase = "reduced"

    @precondition(lambda self: self.phase == "reduced")
    @rule()
    def step(self) -> None:
        self.optimizer.step()
        for name in NAMES:
            self.masters[name] -= self.gradients[name]
        self.unpublished = self.expects_update and self.masters != self.published

    @rule(discard=st.booleans())
    def zero_grad(self, discard: bool) -> None:
        if self.unpublished or (not discard and (self.in_flight or self.unreduced)):
            with pytest.raises(LifecycleError, match="zero_grad"):
                self.parallel.zero_grad(discard=discard)
            if discard:
                self.begin_step()
            return
        self.parallel.zero_grad(discard=discard)
        self.begin_step()

    @rule()
    def publish(self) -> None:
        if self.in_flight or self.unreduced:
            with pytest.raises(LifecycleError, match="publish"):
                self.parallel.publish()
            return
        self.parallel.publish()
        self.parallel.await_weights()
        for name in NAMES:
            assert self.weight(name).item() == self.masters[name]
        self.published = dict(self.masters)
        self.unpublished = False
        self.expects_update = False

    @rule()
    def release_and_gather(self) -> None:
        versions = [self.weight(name)._version for name in NAMES]
        self.parallel.release()
        self.parallel.release()
        assert all(bool(self.weight(name).isnan()) == self.is_cut for name in NAMES)
        self.parallel.await_weights()
        assert not any(bool(self.weight(name).isnan()) for name in NAMES)
        assert versions == [self.weight(name)._version for name in NAMES]

    @invariant()
    def masters_are_what_was_stepped(self) -> None:
        if hasattr(self, "pieces"):
            held = {name: piece.item() for name, piece in self.pieces.items()}
            assert held == self.masters

    @invariant()
    def gradients_appear_only_when_reduced(self) -> None:
        if hasattr(self, "pieces") and self.phase == "reduced":
            found = {name: piece.grad.item() for name, piece in self.pieces.items()}
            assert found == self.gradients


LifecycleMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None
)
TestLifecycle = LifecycleMachine.TestCase
