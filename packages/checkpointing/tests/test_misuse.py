"""What a careless caller does is an error on every rank, or works; never a loss without a word."""

from pathlib import Path

import numpy as np
import pytest
import torch

from trainwright.checkpointing.errors import CheckpointingWarning, TreeError
from trainwright.checkpointing.state import Sharded, StateStore
from trainwright.checkpointing.testing.files import CrashingFiles
from trainwright.collectives import LocalWorld, ShardSpec

ROOT = Path("/runs/a")


def _store(files=None, comm=None, **options):
    return StateStore(ROOT, comm, files=files or CrashingFiles(), **options)


def _told(body, kind):
    """Return what each of two ranks was told."""

    def tell(comm):
        with pytest.raises(kind) as caught:
            body(comm)
        return str(caught.value)

    return LocalWorld(2, timeout_s=20).run(tell)


def test_steps_to_protect_may_come_from_a_generator():
    store = _store(keep=1)
    for step in range(3):
        store.save(step, {"n": step}, protect=(best for best in [0]))
    assert store.steps() == [0, 2]


def test_paths_to_skip_and_convert_may_come_from_a_generator():
    store = _store()
    store.save(1, {"a": torch.ones(2), "b": torch.ones(2)})
    target = {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.float64)}
    store.load_partial(target, skip=(path for path in "a"), convert=(path for path in "b"))
    assert target["a"].sum() == 0
    assert target["b"].sum() == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.save(2, {}, protect=1), "protect must name steps as integers, got 1"),
        (lambda s: s.load({"n": 0}, convert=1), "convert must be a collection of paths, got 1"),
        (lambda s: s.save(2**62, {}, asynchronous=True), r"from 0 to 2\*\*62 - 1, got 4611"),
        (lambda s: s.save(2, {"a": np.ma.masked_array([1], [1])}), "store its data and its mask"),
    ],
)
def test_what_makes_no_sense_is_named_before_the_call_returns(call, message):
    store = _store()
    store.save(1, {"n": 1})
    with pytest.raises(TreeError, match=message):
        call(store)
    assert store.steps() == [1]


@pytest.mark.parametrize(
    "ask",
    [
        lambda rank: {"protect": [1] * rank},
        lambda rank: {"asynchronous": rank == 0},
        lambda rank: {"asynchronous": rank == 1},
    ],
)
def test_ranks_that_save_in_different_ways_all_raise_and_nothing_is_removed(ask):
    files = CrashingFiles()
    LocalWorld(2).run(lambda comm: _store(files, comm, run="a").save(1, {"n": 1}))

    def save(comm):
        with _store(files, comm, run="a", keep=1) as store:
            store.save(2, {"n": 2}, **ask(comm.rank))

    told = _told(save, TreeError)
    assert told[0] == told[1]
    assert "ranks must save the same" in told[0]
    assert _store(files).steps() == [1]


@pytest.mark.parametrize("value", [object(), torch.ones(2)])
def test_a_name_that_is_no_text_reaches_every_rank_in_the_error(value):
    told = _told(
        lambda comm: _store(None, comm).save(1, {"\ud800": value} if comm.rank else {}), TreeError
    )
    assert told[0] == told[1]
    assert "\\ud800" in told[0]


def _nested(depth, wrap):
    value = 1
    for _ in range(depth):
        value = wrap(value)
    return {"x": value}


@pytest.mark.parametrize(
    "wrap", [lambda v: (v,), lambda v: [v], lambda v: {1: v}, lambda v: {"a": v}]
)
def test_what_could_be_saved_and_not_be_loaded_for_its_depth_is_refused(wrap):
    store = _store()
    store.save(1, _nested(100, wrap))
    assert store.load(_nested(100, wrap)) == _nested(100, wrap)
    with pytest.raises(TreeError, match=r"nested too deeply.*at most 100"):
        store.save(2, _nested(450, wrap))


@pytest.mark.parametrize("make", [torch.zeros, lambda size: np.zeros(size, dtype=np.float32)])
def test_a_target_whose_elements_overlap_is_refused(make):
    store = _store()
    store.save(1, {"a": torch.arange(9.0).view(3, 3)})
    target = make(5)
    if isinstance(target, np.ndarray):
        target = np.lib.stride_tricks.as_strided(target, (3, 3), (4, 4))
    else:
        target = target.as_strided((3, 3), (1, 1))
    with pytest.raises(TreeError, match=r"share memory.*\(3, 3\) and strides \(1, 1\)"):
        store.load({"a": target})


def test_a_single_element_may_have_any_stride():
    store = _store()
    store.save(1, {"a": torch.full((1, 4), 3.0)[:, 1]})
    whole = torch.zeros(1, 4)
    store.load({"a": whole[:, 2]})
    assert whole.tolist() == [[0, 0, 3, 0]]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_default_device_changes_nothing(num_ranks):
    files = CrashingFiles()
    matrix = torch.arange(8.0).view(4, 2)

    def go(comm):
        spec = ShardSpec.full("w", (4, 2)).narrow(
            8 * comm.rank // comm.size, 8 // comm.size + 4 * comm.rank
        )
        part = Sharded(matrix.view(-1)[spec.start : spec.stop].clone(), spec)
        target = torch.zeros(2, 4, device="cpu").t()
        empty = Sharded(torch.zeros_like(part.tensor), spec)
        with torch.device("meta"):
            store = _store(files, comm)
            store.save(1, {"w": part, "m": matrix})
            store.load({"w": empty, "m": target})
        assert torch.equal(empty.tensor, part.tensor)
        assert torch.equal(target, matrix)

    LocalWorld(num_ranks).run(go)


def test_a_manifest_of_another_step_makes_no_checkpoint_of_this_one(tmp_path):
    store = StateStore(tmp_path)
    older, newer = (store.save(step, {"w": torch.ones(2), "n": step}) for step in (1, 2))
    (newer / "manifest.json").write_bytes((older / "manifest.json").read_bytes())
    with pytest.warns(CheckpointingWarning, match="its manifest is that of step 1"):
        assert store.load({"w": torch.zeros(2), "n": 0})["n"] == 1
    assert store.steps() == [1]
