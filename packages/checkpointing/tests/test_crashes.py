"""Whatever fails while a checkpoint is being saved, the last complete one is there and is found."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.checkpointing.errors import (
    CheckpointingWarning,
    NoCheckpointError,
    SaveFailedError,
)
from trainwright.checkpointing.state import LocalFiles, Sharded, StateStore, index_file
from trainwright.checkpointing.testing.failing import FailingFiles
from trainwright.checkpointing.testing.files import CrashingFiles, SimulatedCrash
from trainwright.collectives import LocalWorld, PeerFailedError, ShardSpec

ROOT = Path("/runs/a")
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _tree(step, comm=None):
    """A state of 40 float64 whose every element says the step; cut over the ranks."""
    size = comm.size if comm else 1
    rank = comm.rank if comm else 0
    spec = ShardSpec.full("w", (40,)).narrow(40 * rank // size, 40 * (rank + 1) // size)
    local = torch.arange(40.0, dtype=torch.float64)[spec.start : spec.stop] + 100 * step
    return {"w": Sharded(local, spec), "scalar": torch.tensor(step), "step": step}


def _save(files, step, comm=None, **options):
    StateStore(ROOT, comm, files=files, run="r", block_bytes=64, **options).save(
        step, _tree(step, comm)
    )


def _load(files, step=None):
    target = {"w": torch.zeros(40, dtype=torch.float64), "scalar": torch.tensor(0), "step": 0}
    return StateStore(ROOT, files=files, run="r").load(target, step)


def _claim_is_step(loaded, step):
    assert loaded["step"] == step
    assert loaded["scalar"] == step
    assert torch.equal(loaded["w"], torch.arange(40.0, dtype=torch.float64) + 100 * step)


def _run_ranks(num_ranks, files, step, **options):
    if num_ranks == 1:
        _save(files, step, **options)
    else:
        LocalWorld(num_ranks).run(lambda comm: _save(files, step, comm, **options))


@pytest.mark.parametrize(("num_ranks", "keep"), [(1, None), (1, 1), (2, 1), (3, None)])
def test_a_crash_after_any_operation_leaves_the_last_step_or_the_new_one(
    monkeypatch, num_ranks, keep
):
    monkeypatch.setattr(index_file, "ENTRIES_PER_FILE", 2)  # two index files for three ranks
    saved = CrashingFiles()
    _run_ranks(num_ranks, saved, 1, keep=keep)
    whole = saved.after_crash(0)
    _run_ranks(num_ranks, whole, 2, keep=keep)
    names = Counter(path.name for path in whole.paths() if "index" in path.name)
    assert len(names) == (1 if num_ranks == 1 else 2)

    for crash_after in range(whole.num_operations + 1):
        files = saved.after_crash(0)
        files.crash_after = crash_after
        if crash_after < whole.num_operations:
            with pytest.raises((SimulatedCrash, PeerFailedError)):
                _run_ranks(num_ranks, files, 2, keep=keep)
        else:
            _run_ranks(num_ranks, files, 2, keep=keep)

        for seed in range(3):
            survivor = files.after_crash(seed)
            store = StateStore(ROOT, files=survivor, run="r")
            latest = store.latest()
            assert latest in (1, 2)
            assert all("interrupted" in leftover for leftover in store.leftovers())
            assert crash_after < whole.num_operations or latest == 2
            _claim_is_step(_load(survivor), latest)
            if keep is None:
                _claim_is_step(_load(survivor, 1), 1)


def test_a_crash_during_the_first_save_leaves_nothing_that_is_taken_for_a_checkpoint():
    whole = CrashingFiles()
    _save(whole, 1)

    for crash_after in range(whole.num_operations):
        files = CrashingFiles(crash_after)
        with pytest.raises(SimulatedCrash):
            _save(files, 1)
        for seed in range(4):
            survivor = files.after_crash(seed)
            if StateStore(ROOT, files=survivor, run="r").latest() is None:
                with pytest.raises(NoCheckpointError):
                    _load(survivor)
            else:
                _claim_is_step(_load(survivor), 1)


@settings(max_examples=20)
@given(data=st.data())
def test_the_save_after_a_crash_clears_what_the_crash_left(data):
    saved = CrashingFiles()
    _save(saved, 1, keep=1)
    files, whole = saved.after_crash(0), saved.after_crash(0)
    _save(whole, 2, keep=1)
    files.crash_after = data.draw(st.integers(0, whole.num_operations - 1))
    with pytest.raises(SimulatedCrash):
        _save(files, 2, keep=1)

    survivor = files.after_crash(data.draw(st.integers(0, 2**16)))
    _save(survivor, 3, keep=1)

    store = StateStore(ROOT, files=survivor, run="r")
    assert store.latest() == 3
    assert not any("under way" in leftover for leftover in store.leftovers())
    _claim_is_step(_load(survivor), 3)


def test_what_a_save_may_still_commit_is_never_emptied_under_that_name(monkeypatch):
    files = CrashingFiles()
    _save(files, 1, keep=1)
    before = files.num_operations
    whole = files.after_crash(0)
    _save(whole, 2, keep=1)
    files.crash_after = before + (whole.num_operations - before) // 2
    with pytest.raises(SimulatedCrash):
        _save(files, 2, keep=1)
    survivor = files.after_crash(0)
    left = [name for name in survivor.names(ROOT) if name.startswith(".saving-")]
    removed = []
    remove_folder = survivor.remove_folder
    monkeypatch.setattr(
        survivor,
        "remove_folder",
        lambda folder: (removed.append(folder.name), remove_folder(folder)),
    )

    _save(survivor, 3, keep=1)

    assert len(left) == 1
    assert left[0].replace(".saving-", ".removing-") in removed
    assert all(name.startswith(".removing-") for name in removed)


@pytest.mark.parametrize("num_bytes", [0, 1, 300, 500])
def test_a_full_disk_of_one_rank_is_an_error_on_all_ranks_and_changes_nothing(num_bytes):
    files = CrashingFiles()
    _run_ranks(2, files, 10)
    before = {path: bytes(files._file(path).data) for path in files.paths()}

    def save(comm):
        own = FailingFiles(files, "write", FULL, after=num_bytes) if comm.rank == 1 else files
        with pytest.raises(SaveFailedError) as caught:
            _save(own, 20, comm)
        return str(caught.value)

    messages = LocalWorld(2).run(save)

    assert messages[0] == messages[1]
    assert "step 20 was not saved" in messages[0]
    assert "rank 1: OSError(28, 'No space left on device')" in messages[0]
    assert {path: bytes(files._file(path).data) for path in files.paths()} == before
    assert StateStore(ROOT, files=files, run="r").latest() == 10
    _run_ranks(2, files, 20)
    _claim_is_step(_load(files), 20)


@pytest.mark.parametrize("num_calls", range(3))
@pytest.mark.parametrize("operation", ["create", "write", "sync", "size"])
def test_an_operation_that_fails_on_any_rank_is_an_error_on_all_and_changes_nothing(
    monkeypatch, operation, num_calls
):
    monkeypatch.setattr(index_file, "ENTRIES_PER_FILE", 2)
    broken = OSError(errno.EIO, "broken")
    after = 400 * num_calls if operation == "write" else num_calls

    def save(comm, files, failing):
        own = FailingFiles(files, operation, broken, after=after) if comm.rank == failing else files
        try:
            _save(own, 6, comm)
        except SaveFailedError as error:
            return str(error)
        return None

    for failing in range(3):
        files = CrashingFiles()
        _run_ranks(3, files, 5)
        before = sorted(files.paths())
        messages = LocalWorld(3).run(save, files, failing)
        if messages == [None] * 3:
            assert num_calls > 0, "every rank does this at least once"
            _claim_is_step(_load(files), 6)
            continue
        assert len(set(messages)) == 1
        assert f"rank {failing}: OSError(5, 'broken')" in messages[0]
        assert sorted(files.paths()) == before
        assert StateStore(ROOT, files=files, run="r").latest() == 5


@pytest.mark.parametrize("folder", ["names", "make_folder"])
def test_a_read_only_folder_is_an_error_on_all_ranks(folder):
    files = CrashingFiles()
    _run_ranks(2, files, 5)
    read_only = FailingFiles(files, folder, OSError(errno.EROFS, os.strerror(errno.EROFS)))
    with pytest.raises(SaveFailedError, match=r"rank 0: OSError.*Read-only file system"):
        _run_ranks(2, read_only, 6)
    _claim_is_step(_load(files), 5)


def test_two_runs_that_save_into_one_folder_at_once_each_keep_their_own(tmp_path):
    def save(run):
        store = StateStore(tmp_path, run=run, keep=2)
        for step in range(8):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CheckpointingWarning)
                store.save(step, {"w": torch.full((3,), step), "run": run})

    threads = [threading.Thread(target=save, args=(run,)) for run in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    for run in "ab":
        store = StateStore(tmp_path, run=run)
        assert store.steps() == [6, 7]
        assert store.load({"w": torch.zeros(3, dtype=torch.int64), "run": ""})["run"] == run
        assert store.leftovers() == []


@pytest.mark.parametrize(
    ("operation", "after"),
    [
        ("names", 0),
        ("make_folder", 0),
        ("make_folder", 1),
        ("create", 0),
        ("create", 1),
        ("create", 2),
        ("write", 700),
        ("write", 1000),
        ("sync", 0),
        ("sync", 1),
        ("sync", 2),
        ("size", 0),
        ("sync_folder", 0),
        ("sync_folder", 1),
        ("rename", 0),
    ],
)
def test_an_operation_that_fails_on_rank_0_is_an_error_on_all_ranks(operation, after):
    files = CrashingFiles()
    denied = PermissionError(errno.EACCES, "denied", "/runs/a")
    folder = StateStore(ROOT, files=files, run="r").save(5, _tree(5))

    def save(comm):
        own = FailingFiles(files, operation, denied, after=after) if comm.rank == 0 else files
        with pytest.raises(SaveFailedError, match=r"rank 0: .*denied"):
            _save(own, 6, comm)

    LocalWorld(2).run(save)

    assert files.names(ROOT) == [folder.name]
    _claim_is_step(_load(files), 5)


def test_old_checkpoints_that_cannot_be_removed_are_a_warning_and_the_new_one_counts():
    files = CrashingFiles()
    _save(files, 1)
    stuck = FailingFiles(files, "remove_folder", PermissionError(errno.EACCES, "denied"))

    with pytest.warns(UserWarning, match="old checkpoints stay"):
        _save(stuck, 2, keep=1)

    assert StateStore(ROOT, files=files, run="r").steps() == [2]


def test_a_checkpoint_too_large_for_the_disk_is_refused_before_anything_is_written():
    class Small(CrashingFiles):
        def free_bytes(self, folder):
            return 2**20

    files = Small()
    with pytest.raises(SaveFailedError, match="1048576 bytes left, the checkpoint needs 328"):
        _save(files, 1)
    assert list(files.paths()) == []


def test_ranks_that_see_different_folders_are_told_at_the_save():
    def save(comm):
        _save(CrashingFiles(), 1, comm)

    with pytest.raises(SaveFailedError, match=r"no such f"):
        LocalWorld(2).run(save)


WRITER = """
    import sys
    import torch
    from trainwright.checkpointing.state import LocalFiles, StateStore

    store = StateStore(sys.argv[1], run="r", keep=2)
    tensor = torch.zeros(50_000)
    step = 0
    while True:
        step += 1
        tensor.fill_(step)
        store.save(step, {"w": tensor, "step": step})
        print(step, flush=True)
"""


@pytest.mark.processes
def test_a_killed_process_leaves_a_checkpoint_that_loads(tmp_path):
    script = tmp_path / "writer.py"
    script.write_text(textwrap.dedent(WRITER))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    deadline = threading.Timer(100, process.kill)
    deadline.start()
    try:
        reported = int(process.stdout.readline())
        time.sleep(0.2 + 0.1 * torch.rand(()).item())
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
    finally:
        deadline.cancel()
        process.kill()
        process.wait(30)
        process.stdout.close()
    reported = int(rest[-1]) if rest else reported

    store = StateStore(tmp_path / "run", run="r", files=LocalFiles())
    tensor = torch.zeros(50_000)
    loaded = store.load({"w": tensor, "step": 0})

    assert loaded["step"] in (reported, reported + 1)
    assert torch.equal(tensor, torch.full_like(tensor, loaded["step"]))
    store.save(loaded["step"] + 1, {"w": tensor, "step": 0})
    assert store.leftovers() == []
