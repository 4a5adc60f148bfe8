"""Saves, crashes, loads, rotation and damage in any order: what counts is always there."""

from pathlib import Path

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trainwright.checkpointing.errors import DamagedCheckpointError, NoCheckpointError
from trainwright.checkpointing.state import Sharded, StateStore
from trainwright.checkpointing.testing.files import CrashingFiles, SimulatedCrash
from trainwright.collectives import LocalWorld, PeerFailedError, ShardSpec

ROOT = Path("/runs/a")
NUM_ELEMENTS = 24


def _part(comm):
    ends = [NUM_ELEMENTS * rank // comm.size for rank in (comm.rank, comm.rank + 1)]
    return ShardSpec.full("w", (NUM_ELEMENTS,)).narrow(*ends)


def _values(number):
    return torch.arange(float(NUM_ELEMENTS)) + 1000 * number


class StoreMachine(RuleBasedStateMachine):
    """One run in one folder. Each save is numbered, and its tensor says the number."""

    def __init__(self):
        super().__init__()
        self.files = CrashingFiles()
        self.saved = []  # numbers of the checkpoints that must be there, in the order of saving
        self.damaged = set()
        self.number = 0

    def _save(self, num_ranks, keep):
        def save(comm):
            spec = _part(comm)
            tree = {"w": Sharded(spec.extract(_values(self.number)), spec), "n": self.number}
            StateStore(ROOT, comm, files=self.files, keep=keep, run="r", block_bytes=32).save(
                self.number, tree
            )

        self.number += 1
        LocalWorld(num_ranks).run(save)

    def _load(self, num_ranks, number=None):
        def load(comm):
            spec = _part(comm)
            target = Sharded(torch.zeros(spec.numel), spec)
            store = StateStore(ROOT, comm, files=self.files, run="r")
            loaded = store.load({"w": target, "n": 0}, number)
            assert torch.equal(target.tensor, spec.extract(_values(loaded["n"])))
            return loaded["n"]

        return LocalWorld(num_ranks).run(load)

    def _rotate(self, keep):
        if keep is not None:
            self.saved = self.saved[-keep:]

    @rule(num_ranks=st.integers(1, 3), keep=st.none() | st.integers(1, 3))
    def save(self, num_ranks, keep):
        self._save(num_ranks, keep)
        self.saved.append(self.number)
        self._rotate(keep)

    @rule(
        num_ranks=st.integers(1, 2),
        keep=st.none() | st.integers(1, 2),
        after=st.integers(0, 60),
        seed=st.integers(0, 2**16),
    )
    def crash_while_saving(self, num_ranks, keep, after, seed):
        self.files.crash_after = self.files.num_operations + after
        try:
            self._save(num_ranks, keep)
            returned = True
        except (SimulatedCrash, PeerFailedError):
            returned = False
        self.files = self.files.after_crash(seed)

        there = StateStore(ROOT, files=self.files, run="r").steps()
        if returned or self.number in there:
            self.saved.append(self.number)
        # A crash between two removals may leave more than the limit, never less.
        least = self.saved[-keep:] if keep is not None else self.saved
        assert set(least) <= set(there) <= set(self.saved)
        self.saved = there

    @precondition(lambda self: self.saved)
    @rule(num_ranks=st.integers(1, 3), data=st.data())
    def load(self, num_ranks, data):
        number = data.draw(st.sampled_from(self.saved))
        try:
            assert self._load(num_ranks, number) == [number] * num_ranks
        except DamagedCheckpointError:
            assert number in self.damaged  # a header may be, of which a load has no use

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def damage(self, data):
        number = data.draw(st.sampled_from(self.saved))
        wanted = f"step-{number:08d}"
        paths = [path for path in self.files.paths() if path.parent.name.startswith(wanted)]
        path = data.draw(st.sampled_from([p for p in paths if p.suffix == ".safetensors"]))
        if number not in self.damaged:
            self.files.flip_bit(path, data.draw(st.integers(0, 8 * self.files.size(path) - 1)))
            self.damaged.add(number)

    @invariant()
    def the_latest_is_the_one_saved_last(self):
        store = StateStore(ROOT, files=self.files, run="r")
        assert store.steps() == self.saved
        assert store.latest() == (self.saved[-1] if self.saved else None)

    @invariant()
    def without_checkpoints_a_load_says_so(self):
        if not self.saved:
            try:
                self._load(1)
                raise AssertionError("there is nothing to load")
            except NoCheckpointError:
                pass


StoreMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)
TestStore = StoreMachine.TestCase
