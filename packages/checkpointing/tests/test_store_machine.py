"""Saves, crashes, loads, rotation and damage in any order: what counts is always there."""

import contextlib
import warnings
from pathlib import Path

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trainwright.checkpointing.errors import (
    CheckpointingWarning,
    DamagedCheckpointError,
    NoCheckpointError,
    SaveFailedError,
)
from trainwright.checkpointing.state import Retention, Sharded, StateStore
from trainwright.checkpointing.testing.files import CrashingFiles, SimulatedCrash
from trainwright.collectives import LocalWorld, PeerFailedError, ShardSpec

ROOT = Path("/runs/a")
NUM_ELEMENTS = 24

RETENTIONS = st.none() | st.builds(Retention, st.integers(1, 3), st.none() | st.integers(2, 4))


def _part(comm):
    ends = [NUM_ELEMENTS * rank // comm.size for rank in (comm.rank, comm.rank + 1)]
    return ShardSpec.full("w", (NUM_ELEMENTS,)).narrow(*ends)


def _values(number):
    return torch.arange(float(NUM_ELEMENTS)) + 1000 * number


def _kept(numbers, keep, protect):
    """Return what is left of checkpoints after a save, the last of which is the new one."""
    if keep is None:
        return numbers
    return [
        number
        for place, number in enumerate(numbers)
        if place >= len(numbers) - keep.last
        or number in protect
        or (keep.every is not None and number % keep.every == 0)
    ]


class StoreMachine(RuleBasedStateMachine):
    """Two runs in one folder. Each save is numbered, and its tensors say the number.

    One run is damaged and crashed and changes its layout; the other one only has to stay whole.
    """

    def __init__(self):
        super().__init__()
        self.files = CrashingFiles()
        self.damaged = set()
        self.number = 0
        self.foreign = []
        self.quiet = warnings.catch_warnings()
        self.quiet.__enter__()
        warnings.simplefilter("ignore", CheckpointingWarning)

    def teardown(self):
        self.quiet.__exit__(None, None, None)

    def _store(self, comm=None, run="mine", **options):
        return StateStore(ROOT, comm, files=self.files, run=run, block_bytes=32, **options)

    def _listed(self):
        return self._store().steps()

    def _save(self, num_ranks, asynchronous=False, protect=(), **options):
        def save(comm):
            spec = _part(comm)
            part = spec.extract(_values(self.number))
            shared = torch.tensor([self.number])
            tree = {"w": Sharded(part, spec), "s": shared, "n": self.number}
            with self._store(comm, **options) as store:
                store.save(self.number, tree, protect=protect, asynchronous=asynchronous)
                part.fill_(-1.0)  # the next step, of which nothing may be saved
                shared.fill_(-1)
                tree["n"] = -1

        self.number += 1
        LocalWorld(num_ranks).run(save)

    def _load(self, num_ranks, number=None, run="mine"):
        """Return the number that is found in all of what was loaded."""

        def load(comm):
            spec = _part(comm)
            target = Sharded(torch.zeros(spec.numel), spec)
            shared = torch.zeros(1, dtype=torch.int64)
            tree = self._store(comm, run).load({"w": target, "s": shared, "n": 0}, number)
            assert torch.equal(target.tensor, spec.extract(_values(tree["n"])))
            assert shared.item() == tree["n"]
            return tree["n"]

        found = LocalWorld(num_ranks).run(load)
        assert len(set(found)) == 1
        return found[0]

    @rule(
        num_ranks=st.integers(1, 3),
        keep=RETENTIONS,
        asynchronous=st.booleans(),
        protect=st.frozensets(st.integers(1, 6), max_size=2),
    )
    def save(self, num_ranks, keep, asynchronous, protect):
        before = self._listed()
        self._save(num_ranks, asynchronous, protect, keep=keep)
        assert self._listed() == _kept([*before, self.number], keep, protect)

    @rule(
        num_ranks=st.integers(1, 2),
        keep=RETENTIONS,
        asynchronous=st.booleans(),
        after=st.integers(0, 70),
        seed=st.integers(0, 2**16),
    )
    def crash_while_saving(self, num_ranks, keep, asynchronous, after, seed):
        before = self._listed()
        self.files.crash_after = self.files.num_operations + after
        returned = False
        # Of a rank that waits for one that crashed, the waiting ends in one of these.
        with contextlib.suppress(SimulatedCrash, PeerFailedError, SaveFailedError):
            self._save(num_ranks, asynchronous, keep=keep)
            returned = True
        self.files = self.files.after_crash(seed)

        after = self._listed()
        saved = [*before, self.number] if self.number in after else before
        assert self.number in after or not returned
        # A crash between two removals may leave more than the limit, never less.
        assert {*_kept(saved, keep, ())} <= {*after} <= {*saved}

    @rule(num_ranks=st.integers(1, 2))
    def save_in_another_run(self, num_ranks):
        self._save(num_ranks, run="other", keep=2)
        self.foreign = [*self.foreign, self.number][-2:]

    @precondition(lambda self: self._listed())
    @rule(num_ranks=st.integers(1, 3), data=st.data())
    def load(self, num_ranks, data):
        number = data.draw(st.sampled_from(self._listed()))
        try:
            assert self._load(num_ranks, number) == number
        except (DamagedCheckpointError, NoCheckpointError):
            assert number in self.damaged

    @rule(num_ranks=st.integers(1, 3))
    def load_the_newest(self, num_ranks):
        listed = self._listed()
        whole = [number for number in listed if number not in self.damaged]
        try:
            found = self._load(num_ranks)
            assert found in listed
            assert not whole or listed.index(found) >= listed.index(whole[-1])
        except NoCheckpointError:
            assert not whole
        except DamagedCheckpointError:
            assert listed[-1] in self.damaged

    @precondition(lambda self: self._listed())
    @rule(data=st.data(), how=st.sampled_from(["flip", "truncate", "delete"]))
    def damage(self, data, how):
        number = data.draw(st.sampled_from(self._listed()))
        folder = f"step-{number:08d}"
        paths = [path for path in self.files.paths() if path.parent.name.startswith(folder)]
        path = data.draw(st.sampled_from(paths))
        size = self.files.size(path)
        self.damaged.add(number)
        if how == "delete":
            self.files.delete(path)
        elif how == "truncate" and size:
            self.files.truncate(path, data.draw(st.integers(0, size - 1)))
        elif size:
            self.files.flip_bit(path, data.draw(st.integers(0, 8 * size - 1)))

    @invariant()
    def the_latest_is_the_newest_complete_one(self):
        listed = self._listed()
        latest = self._store().latest()
        whole = [number for number in listed if number not in self.damaged]
        assert latest is not None or not whole
        assert latest is None or listed.index(latest) >= (listed.index(whole[-1]) if whole else 0)

    @invariant()
    def the_other_run_is_whole(self):
        assert self._store(run="other").steps() == self.foreign
        if self.foreign:
            assert self._load(1, run="other") == self.foreign[-1]


StoreMachine.TestCase.settings = settings(
    max_examples=max(1, settings.default.max_examples // 2), stateful_step_count=12, deadline=None
)
TestStore = StoreMachine.TestCase
