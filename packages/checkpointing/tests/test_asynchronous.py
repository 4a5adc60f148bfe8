"""An asynchronous save is a save of the moment it was called in, and every rank hears how it ended.

The file systems here stop where a test wants them to, so that no race is left to chance.
"""

import errno
import gc
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.checkpointing import CheckpointingWarning, SaveFailedError, Sharded, TreeError
from trainwright.checkpointing.state import LocalFiles, StateStore
from trainwright.checkpointing.testing.failing import FailingFiles
from trainwright.checkpointing.testing.files import CrashingFiles, SimulatedCrash
from trainwright.checkpointing.testing.layouts import DTYPES, layouts, random_tensors, shapes
from trainwright.collectives import LocalWorld, PeerFailedError, ShardSpec, SharedMemoryCommunicator
from trainwright.collectives.testing import run_processes

ROOT = Path("/runs/a")


def _failing(operation, files=None):
    """Return files on a full disk; the error is a new one, since errors keep what raised them."""
    return FailingFiles(files or CrashingFiles(), operation, OSError(errno.ENOSPC, "full disk"))


class Gated(CrashingFiles):
    """Files that can be created only once the gate is open."""

    def __init__(self, is_open=False):
        super().__init__()
        self.gate = threading.Event()
        self.num_inside = self.most_inside = 0
        if is_open:
            self.gate.set()

    def create(self, path):
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        assert self.gate.wait(20)
        self.num_inside -= 1
        return super().create(path)


def _load(store, tree, step=None):
    empty = {
        key: torch.zeros_like(value).contiguous() if isinstance(value, torch.Tensor) else None
        for key, value in tree.items()
    }
    return store.load(empty, step)


def _count_tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_nothing_that_changes_after_the_call_is_in_the_checkpoint():
    files = Gated()
    strided = torch.arange(12.0).view(3, 4).t()
    state = {"w": torch.ones(5), "counter": torch.tensor(7), "strided": strided, "plain": [1, [2]]}

    with StateStore(ROOT, files=files) as store:
        pending = store.save(1, state, asynchronous=True)
        for name in ("w", "counter", "strided"):
            state[name].add_(100)
        state["plain"][1].append(3)
        state["new"] = 1
        assert not pending.is_done
        files.gate.set()
        assert pending.wait().name.startswith("step-00000001-")
        del state["new"]
        loaded = _load(store, state)

    assert loaded["w"].tolist() == [1] * 5
    assert loaded["counter"] == 7
    assert torch.equal(loaded["strided"], torch.arange(12.0).view(3, 4).t())
    assert loaded["plain"] == [1, [2]]


@settings(max_examples=10)
@given(data=st.data())
def test_an_asynchronous_save_writes_the_files_of_a_synchronous_one(data):
    drawn = data.draw(shapes())
    layout = data.draw(layouts(drawn, max_ranks=4))
    dtype = data.draw(st.sampled_from(DTYPES))
    whole = [random_tensors(drawn, dtype, seed) for seed in (1, 2)]

    def run(asynchronous):
        files = CrashingFiles()

        def save(comm):
            at = layout.coordinates(comm.rank)
            with StateStore(ROOT, comm, coordinates=at, files=files, run="r") as store:
                state = layout.take(comm.rank, whole[0])
                for step in (0, 1):
                    for path, leaf in state.items():
                        leaf.tensor.copy_(leaf.spec.extract(whole[step][path]).view_as(leaf.tensor))
                    store.save(step, {"t": state, "s": [step]}, asynchronous=asynchronous)
                for leaf in state.values():
                    leaf.tensor.zero_()

        LocalWorld(layout.world_size).run(save)
        data_files = [path for path in files.paths() if path.suffix == ".safetensors"]
        return [(path.name, bytes(files._file(path).data)) for path in data_files]

    assert run(asynchronous=True) == run(asynchronous=False)


def test_tensors_of_one_memory_are_copied_once_and_others_keep_their_own():
    shared = torch.arange(4.0)
    store = StateStore(ROOT, files=CrashingFiles())
    tree = {"a": shared, "b": shared, "flat": shared.view(2, 2), "twin": shared.clone()}

    store.save(1, tree, asynchronous=True).wait()

    assert len(store._saver._background.buffers._buffers) == 2
    assert _load(store, tree)["flat"].tolist() == [[0, 1], [2, 3]]
    store.close()
    assert not store._saver._background.buffers._buffers


def test_a_load_waits_for_the_save_before_it():
    files = Gated()
    store = StateStore(ROOT, files=files)
    store.save(1, {"w": torch.ones(3)}, asynchronous=True)
    opener = threading.Timer(0.1, files.gate.set)
    opener.start()

    loaded = store.load({"w": torch.zeros(3)}, 1)

    assert loaded["w"].tolist() == [1, 1, 1]
    opener.join()


def test_at_most_one_save_is_under_way():
    files = Gated()
    with StateStore(ROOT, files=files) as store:
        first = store.save(1, {"w": torch.ones(3)}, asynchronous=True)
        opener = threading.Timer(0.1, files.gate.set)
        opener.start()
        second = store.save(2, {"w": torch.ones(3)}, asynchronous=True)
        assert first.is_done
        store.save(3, {"w": torch.ones(3)})
        assert second.is_done
        opener.join()
        assert store.steps() == [1, 2, 3]
    assert files.most_inside == 1


def test_many_saves_use_the_memory_and_the_threads_of_one():
    with StateStore(ROOT, files=CrashingFiles(), keep=1) as store:
        state = {"w": torch.zeros(1000), "more": {"b": torch.zeros(3, 3)}}
        store.save(0, state, asynchronous=True).wait()
        threads = threading.active_count()
        buffers = store._saver._background.buffers
        places = {path: copy.data_ptr() for path, copy in buffers._buffers.items()}
        alive = _count_tensors()

        for step in range(1, 21):
            state["w"].fill_(step)
            store.save(step, state, asynchronous=True)

        assert threading.active_count() <= threads + 1
        assert {path: copy.data_ptr() for path, copy in buffers._buffers.items()} == places
        store.close()
        assert threading.active_count() == threads
        assert _count_tensors() <= alive
        assert store.load({"w": torch.zeros(1000), "more": {"b": torch.zeros(3, 3)}})["w"][0] == 20


def test_memory_follows_the_tree_that_was_saved_last():
    with StateStore(ROOT, files=CrashingFiles()) as store:
        store.save(1, {"a": torch.ones(3), "b": torch.ones(2)}, asynchronous=True)
        store.save(2, {"a": torch.ones(5)}, asynchronous=True)
        buffers = store._saver._background.buffers._buffers
        assert {path: copy.numel() for path, copy in buffers.items()} == {"a": 5}
        assert store.load({"a": torch.zeros(5)})["a"].sum() == 5


@pytest.mark.parametrize("call", ["save", "asynchronous", "load", "close", "wait"])
def test_a_rank_that_fails_in_the_background_is_an_error_on_all_ranks_at_their_next_call(call):
    files = CrashingFiles()

    def train(comm):
        own = _failing("write", files) if comm.rank == 1 else files
        spec = ShardSpec.full("w", (4,)).narrow(2 * comm.rank, 2 * comm.rank + 2)
        state = {"w": Sharded(torch.ones(2), spec)}
        store = StateStore(ROOT, comm, files=own)
        pending = store.save(1, state, asynchronous=True)
        calls = {
            "save": lambda: store.save(2, state),
            "asynchronous": lambda: store.save(2, state, asynchronous=True),
            "load": lambda: store.load(state),
            "close": store.close,
            "wait": pending.wait,
        }
        with pytest.raises(SaveFailedError, match=r"rank 1: OSError.*full disk") as caught:
            calls[call]()
        own.after = 10**6
        store.save(3, state, asynchronous=True)
        store.close()
        return str(caught.value), store.steps()

    first, second = LocalWorld(2).run(train)

    assert first == second
    assert first[1] == [3]
    assert len(files.names(ROOT)) == 1


def test_a_state_that_cannot_be_stored_is_told_before_the_call_returns():
    def train(comm):
        store = StateStore(ROOT, comm, files=CrashingFiles())
        with pytest.raises(TreeError, match="rank 1: w: only tensors"):
            store.save(1, {"w": {1, 2} if comm.rank else torch.ones(1)}, asynchronous=True)
        store.close()

    LocalWorld(2).run(train)


def test_states_that_differ_between_ranks_are_told_at_the_next_call():
    def train(comm):
        store = StateStore(ROOT, comm, files=files)
        store.save(1, {"w": torch.tensor(comm.rank)}, asynchronous=True)
        with pytest.raises(TreeError, match="not the same as on rank 0"):
            store.close()

    files = CrashingFiles()
    LocalWorld(2).run(train)
    assert list(files.paths()) == []


def test_a_rank_that_ends_in_the_background_takes_the_others_along():
    files, heard, told = CrashingFiles(), [], threading.Event()

    def train(comm):
        own = CrashingFiles(crash_after=0) if comm.rank == 1 else files
        spec = ShardSpec.full("w", (4,)).narrow(2 * comm.rank, 2 * comm.rank + 2)
        store = StateStore(ROOT, comm, files=own, timeout_s=5)
        pending = store.save(1, {"w": Sharded(torch.ones(2), spec)}, asynchronous=True)
        if comm.rank == 1:  # which goes on computing
            assert told.wait(20)
        try:
            pending.wait()
        except BaseException as error:
            heard.append((comm.rank, type(error)))
            raise
        finally:
            told.set()

    with pytest.raises((SimulatedCrash, PeerFailedError)):
        LocalWorld(2).run(train)
    assert heard[0] == (0, PeerFailedError)
    assert StateStore(ROOT, files=files).latest() is None


def test_an_error_that_nobody_asks_for_is_a_warning_at_the_end():
    def save():
        store = StateStore(ROOT, files=_failing("create"))
        store.save(1, {"w": torch.ones(3)}, asynchronous=True)._thread.join()

    save()
    with pytest.warns(CheckpointingWarning, match="step 1 was not saved, and nobody asked"):
        gc.collect()


def test_an_error_of_training_is_not_replaced_by_one_of_the_save():
    def train():
        with StateStore(ROOT, files=_failing("create")) as store:
            store.save(1, {"w": torch.ones(3)}, asynchronous=True)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        train()
    assert "full disk" in caught.value.__notes__[0]


def test_what_a_save_warns_of_is_heard_by_who_asks_next():
    files = CrashingFiles()
    StateStore(ROOT, files=files, run="other").save(1, {"w": torch.ones(1)})
    stuck = FailingFiles(files, "remove_folder", PermissionError(errno.EACCES, "denied"))
    store = StateStore(ROOT, files=stuck, run="r", keep=1)
    with pytest.warns(CheckpointingWarning, match="checkpoints of other runs"):
        store.save(1, {"w": torch.ones(1)})

    store.save(2, {"w": torch.ones(1)}, asynchronous=True)

    with pytest.warns(CheckpointingWarning, match="old checkpoints stay"):
        store.close()


def train_while_saving(comm, folder, num_ranks):
    """Make many collectives while a save cannot go on, then let it."""
    may_go_on = threading.Event()

    class Slow(LocalFiles):
        def create(self, path):
            assert may_go_on.wait(20)
            return super().create(path)

    spec = ShardSpec.full("w", (4,)).narrow(2 * comm.rank, 2 * comm.rank + 2)
    weight = torch.full((2,), 1.0)
    with StateStore(folder, comm, files=Slow(), timeout_s=30) as store:
        for step in range(2):
            may_go_on.clear()
            weight.fill_(step)
            pending = store.save(step, {"w": Sharded(weight, spec)}, asynchronous=True)
            total = torch.zeros(1000)
            for _ in range(150):
                total.add_(1)
                comm.all_reduce(total).wait()
                total.div_(num_ranks)
            weight.fill_(-1)
            assert total[0] == 150
            assert not pending.is_done
            may_go_on.set()
            pending.wait()
        whole = torch.zeros(4)
        store.load({"w": whole})
        assert whole.tolist() == [1] * 4


def test_collectives_of_training_go_on_during_a_save(tmp_path):
    LocalWorld(2).run(train_while_saving, tmp_path, 2)


def train_in_processes(comm, folder):
    """Do the same over Gloo, then over shared memory."""
    train_while_saving(comm, folder / "gloo", 2)
    train_while_saving(SharedMemoryCommunicator(), folder / "shared", 2)


@pytest.mark.processes
def test_collectives_of_training_go_on_during_a_save_of_real_processes(tmp_path):
    run_processes(train_in_processes, 2, tmp_path, timeout_s=60)


@pytest.mark.processes
def test_the_end_of_the_interpreter_waits_for_a_save(tmp_path):
    script = """
        import sys, time, torch
        from trainwright.checkpointing.state import LocalFiles, StateStore

        class Slow(LocalFiles):
            def create(self, path):
                time.sleep(0.2)
                return super().create(path)

        store = StateStore(sys.argv[1], files=Slow())
        store.save(4, {"w": torch.ones(3)}, asynchronous=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    subprocess.run(command, check=True, timeout=60)
    assert StateStore(tmp_path).load({"w": torch.zeros(3)}, 4)["w"].sum() == 3


@pytest.mark.parametrize("way", [torch.inference_mode, torch.enable_grad])
def test_what_an_asynchronous_save_takes_is_what_a_synchronous_one_takes(tmp_path, way):
    weight = torch.ones(3, requires_grad=True)
    state = {"count": Counter(a=2), "rows": [weight * 2, {"t": (1, weight)}], "n": np.ones(2)}
    store = StateStore(tmp_path)
    with way():
        store.save(1, state, asynchronous=True).wait()
    store.save(2, state, asynchronous=True).wait()

    for step in (1, 2):
        target = {"count": Counter(), "rows": [torch.zeros(3), {"t": (0, torch.zeros(3))}]}
        loaded = store.load({**target, "n": np.zeros(2)}, step)
        assert loaded["count"] == Counter(a=2)
        assert loaded["rows"][0].tolist() == [2.0] * 3
        assert loaded["rows"][1]["t"][1].tolist() == [1.0] * 3
        assert loaded["n"].tolist() == [1.0, 1.0]
