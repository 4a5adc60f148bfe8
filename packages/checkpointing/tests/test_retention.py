"""Retention removes old checkpoints of its own run and nothing else."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright.checkpointing.errors import CheckpointingWarning, NoCheckpointError, TreeError
from trainwright.checkpointing.state import Retention, StateStore
from trainwright.checkpointing.testing.files import CrashingFiles


def _store(files, **options):
    return StateStore("/runs/a", files=files, **options)


def _state(value):
    return {"w": torch.tensor([float(value)])}


def _loaded(store, step=None):
    return store.load(_state(0), step)["w"].item()


@pytest.mark.parametrize(("best", "left"), [(10, [10, 30]), (30, [30]), (20, [20, 30])])
def test_the_newest_and_the_protected_stay_whatever_the_limit(best, left):
    store = _store(CrashingFiles(), keep=1)
    for step in (10, 20, 30):
        store.save(step, _state(step), protect=[best])
    assert store.steps() == left


def test_every_nth_step_stays_beside_the_last_ones():
    store = _store(CrashingFiles(), keep=Retention(last=2, every=30))
    for step in range(10, 110, 10):
        store.save(step, _state(step))
    assert store.steps() == [30, 60, 90, 100]


def test_a_best_one_is_named_by_its_step_and_never_by_a_path_that_could_be_spelled_otherwise():
    store = _store(CrashingFiles(), keep=1)
    folder = store.save(1, _state(1))
    for protect in ([folder], [str(folder)], "1", [True], [1.0]):
        with pytest.raises(TreeError, match="protect must name steps as integers"):
            store.save(2, _state(2), protect=protect)
    assert store.steps() == [1]


def test_what_is_not_complete_takes_no_place_of_a_whole_one():
    files = CrashingFiles()
    store = _store(files, run="a", keep=2)
    for step in (1, 2):
        store.save(step, _state(step))
    torn = [path for path in files.paths() if path.parent.name.startswith("step-00000002")]
    files.truncate(next(path for path in torn if path.name == "manifest.json"), 10)

    store.save(3, _state(3))

    assert store.steps() == [1, 3]
    assert _loaded(store, 1) == 1


class _StaleFiles(CrashingFiles):
    """A network file system that shows a renamed folder late."""

    stale = False

    def names(self, folder):
        found = super().names(folder)
        return [name for name in found if "00000002" not in name] if self.stale else found


def test_nothing_is_removed_for_a_new_one_that_cannot_be_seen():
    files = _StaleFiles()
    store = _store(files, run="a", keep=1)
    store.save(1, _state(1))
    files.stale = True

    with pytest.warns(CheckpointingWarning, match=r"old checkpoints stay.*not seen complete"):
        store.save(2, _state(2))

    assert _loaded(store, 1) == 1


def test_paths_to_the_folder_may_be_spelled_in_any_way(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)

    roots = ["real", "link", str(tmp_path / "real"), "real/../link"]
    for step, root in enumerate(itertools.chain(roots, roots)):
        StateStore(root, keep=1, run="r").save(step, _state(step), protect=[0])

    assert StateStore("real", run="r").steps() == [0, 7]


def test_a_store_does_not_lose_its_folder_when_the_working_directory_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = StateStore("run")
    store.save(1, _state(1))
    monkeypatch.chdir("/")
    assert store.latest() == 1


def test_a_new_run_in_a_used_folder_rotates_only_its_own_checkpoints():
    files = CrashingFiles()
    old = _store(files, run="old")
    for step in (500, 600, 700):
        old.save(step, _state(step))

    new = _store(files, keep=3)
    with pytest.warns(CheckpointingWarning, match="3 checkpoints of other runs"):
        new.save(100, _state(100))
    for step in (200, 300, 400):
        new.save(step, _state(step))

    assert new.steps() == [200, 300, 400]
    assert new.latest() == 400
    assert _loaded(new) == 400
    assert old.steps() == [500, 600, 700]
    assert new.runs() == ["old", new.run]


def test_a_store_without_a_run_goes_on_with_the_run_it_loads():
    files = CrashingFiles()
    _store(files, run="a", keep=2).save(1, _state(1))

    resumed = _store(files, keep=2)
    assert _loaded(resumed) == 1
    for step in (2, 3):
        resumed.save(step, _state(step))

    assert resumed.run == "a"
    assert resumed.steps() == [2, 3]


def test_the_newest_is_the_one_saved_last_not_the_one_with_the_greatest_number():
    files = CrashingFiles()
    store = _store(files, run="a")
    for step in (9, 10, 100, 20):
        store.save(step, _state(step))
    assert store.steps() == [9, 10, 100, 20]
    assert store.latest() == 20


def test_a_step_saved_again_counts_as_new_and_the_newer_one_is_loaded():
    files = CrashingFiles()
    store = _store(files, run="a", keep=2)
    for step, value in ((1, 10), (2, 20), (1, 11)):
        store.save(step, _state(value))

    assert store.steps() == [2, 1]
    assert _loaded(store, 1) == 11
    store.save(3, _state(30))
    assert store.steps() == [1, 3]
    assert _loaded(store, 1) == 11


def test_of_a_protected_step_that_was_saved_again_only_the_newer_one_stays(tmp_path):
    store = StateStore(tmp_path, keep=Retention(last=1, every=2))
    for step, value in ((2, 1), (2, 2), (3, 3), (3, 4), (5, 5)):
        store.save(step, _state(value), protect=[3])
    assert len(list(tmp_path.glob("step-*"))) == 3
    assert [_loaded(store, step) for step in (2, 3, 5)] == [2, 4, 5]


def test_a_run_without_checkpoints_is_told_whose_there_are():
    files = CrashingFiles()
    _store(files, run="a").save(7, _state(7))
    with pytest.raises(NoCheckpointError, match=r"of run 'b'; complete: step 7 of run 'a'"):
        _loaded(_store(files, run="b"))
    with pytest.raises(NoCheckpointError, match="no complete checkpoint of step 8"):
        _loaded(_store(files), 8)
    assert _store(files, run="b").latest() is None


@pytest.mark.filterwarnings("ignore::trainwright.checkpointing.errors.CheckpointingWarning")
@given(
    saves=st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.sets(st.integers(0, 5))), max_size=8
    ),
    keep=st.integers(1, 3),
    every=st.none() | st.integers(1, 3),
)
def test_what_is_left_is_what_was_kept_and_protected(saves, keep, every):
    files = CrashingFiles()
    stores = {run: _store(files, run=run, keep=Retention(keep, every)) for run in "ab"}
    model = {"a": [], "b": []}

    for number, (run, step, protect) in enumerate(saves):
        stores[run].save(step, _state(number), protect=protect)
        model[run].append((step, number))
        newest = dict(model[run])
        model[run] = [
            (step, number)
            for place, (step, number) in enumerate(model[run])
            if place >= len(model[run]) - keep
            or ((step in protect or (every and step % every == 0)) and newest[step] == number)
        ]

    for run, store in stores.items():
        newest = dict(model[run])
        assert sorted(store.steps()) == sorted(newest)
        for step, number in newest.items():
            assert _loaded(store, step) == number


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0}, "keep must be at least 1"),
        ({"keep": True}, "keep must be at least 1"),
        ({"keep": "all"}, "keep must be at least 1"),
        ({"run": "../up"}, "run must be"),
        ({"run": ""}, "run must be"),
        ({"block_bytes": 24}, "multiple of 16"),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused(options, message):
    with pytest.raises(TreeError, match=message):
        _store(CrashingFiles(), **options)


@pytest.mark.parametrize("every", [0, -1, True, 2.0])
def test_a_retention_that_makes_no_sense_is_refused(every):
    with pytest.raises(TreeError, match="keep: every must be at least 1"):
        Retention(last=1, every=every)
