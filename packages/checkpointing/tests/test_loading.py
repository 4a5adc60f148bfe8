"""What a load costs in memory, and what it leaves behind when it fails."""

import math
import tracemalloc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.checkpointing.errors import DamagedCheckpointError, LoadFailedError, TreeError
from trainwright.checkpointing.state import Sharded, StateStore
from trainwright.checkpointing.testing.files import CrashingFiles
from trainwright.collectives import LocalWorld, ShardSpec

ROOT = Path("/runs/a")
NAMES = ["a", "b", "c", "d"]
PART_BYTES = 2**20  # far above what is said of the tensors


def _store(files, comm=None):
    return StateStore(ROOT, comm, files=files, block_bytes=64, run="r")


def _state(step):
    return {name: torch.arange(64.0) + 100 * n + step for n, name in enumerate(NAMES)}


def _zeros():
    return {name: torch.zeros(64) for name in NAMES}


class NewTensors(TorchDispatchMode):
    """Notes the most bytes of tensors that were made inside it and were there at one time."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._made = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function._schema.name
        if isinstance(result, torch.Tensor) and not function.is_view and not name.endswith("_"):
            self._made = [made for made in self._made if made() is not None]
            self._made.append(weakref.ref(result))
            self.peak = max(self.peak, sum(made().nbytes for made in self._made))
        return result


def _strided(count):
    return torch.zeros(count, 2)[:, 0]


@pytest.mark.parametrize(
    ("make", "options", "parts"),
    [
        (torch.zeros, {}, 0),
        (_strided, {}, 1),
        (lambda count: torch.zeros(count, dtype=torch.float64), {"convert": ["*"]}, 1),
    ],
)
def test_a_load_takes_the_memory_of_one_part_more_where_it_cannot_fill_in_place(
    tmp_path, make, options, parts
):
    """As many ranks hold as many parts, an eager load would need dp times the memory of one."""
    count = PART_BYTES // 4
    whole = {name: torch.rand(2 * count) for name in NAMES}
    StateStore(tmp_path).save(1, whole)
    spec = ShardSpec.full("w", (2 * count,)).narrow(count, 2 * count)
    target = {name: Sharded(make(count), spec) for name in NAMES}
    with NewTensors():
        StateStore(tmp_path).load(target, **options)  # what is imported at the first is not counted
    for name in NAMES:
        target[name].tensor.zero_()

    tracemalloc.start()
    try:
        with NewTensors() as tensors:
            StateStore(tmp_path).load(target, **options)
        others = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert parts * PART_BYTES <= tensors.peak <= parts * PART_BYTES + 1000
    assert others < PART_BYTES
    for name in NAMES:
        assert torch.equal(target[name].tensor.float(), whole[name][count:])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_load_that_met_damage_says_what_it_overwrote_and_can_be_repeated(num_ranks):
    files = CrashingFiles()
    for step in (1, 2):
        folder = _store(files).save(step, _state(step))
    path = folder / "rank-00000.safetensors"
    files.flip_bit(path, 8 * (files.size(path) - 4 * 16 - 2 * 256 + 5))  # in the first block of c

    def load(comm):
        target = _zeros()
        with pytest.raises(DamagedCheckpointError) as caught:
            _store(files, comm).load(target)
        assert target["b"].tolist() == _state(2)["b"].tolist()
        assert target["d"].count_nonzero() == 0
        store = _store(files, comm)
        store.load(target, 1)
        assert all(torch.equal(target[name], value) for name, value in _state(1).items())
        return str(caught.value)

    told = LocalWorld(num_ranks).run(load)
    assert len(set(told)) == 1
    assert "tensor 'c', bytes 0 to 64" in told[0]
    assert "2 of this rank's 4 tensors had been overwritten (a, b), c perhaps in part" in told[0]
    assert "load another step before they are used" in told[0]


def test_a_read_that_fails_on_one_rank_is_told_on_all_with_what_was_overwritten():
    class FailingReads(CrashingFiles):
        def open(self, path):
            reader = super().open(path)
            inner = reader.view

            def view(offset, count):
                if path.name == "rank-00001.safetensors":
                    raise OSError(5, "Input/output error", str(path))
                return inner(offset, count)

            reader.view = view
            return reader

    files = FailingReads()

    def spec(comm):
        return ShardSpec.full("w", (64,)).narrow(32 * comm.rank, 32 * comm.rank + 32)

    def save(comm):
        parts = {name: spec(comm).extract(whole) for name, whole in _state(1).items()}
        _store(files, comm).save(1, {name: Sharded(x, spec(comm)) for name, x in parts.items()})

    def load(comm):
        target = {name: Sharded(torch.zeros(32), spec(comm)) for name in NAMES}
        with pytest.raises(LoadFailedError) as caught:
            _store(files, comm).load(target)
        return str(caught.value)

    LocalWorld(2).run(save)
    told = LocalWorld(2).run(load)
    assert told[0] == told[1]
    assert "rank 1: OSError: [Errno 5] Input/output error" in told[0]
    assert "0 of this rank's 4 tensors had been overwritten, a perhaps in part" in told[0]


def _inference():
    with torch.inference_mode():
        return torch.zeros(3)


def _read_only():
    array = np.zeros(3, dtype=np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: torch.zeros(1).expand(3), "elements of an expanded tensor share memory"),
        (_inference, "an inference tensor can be filled under inference_mode"),
        (_read_only, "numpy array of float32: it is read-only and cannot be filled"),
    ],
)
def test_a_tensor_that_cannot_be_written_to_is_refused_before_anything_is_read(make, problem):
    files = CrashingFiles()
    _store(files).save(0, {"a": torch.ones(3), "b": make() if make is _inference else make() + 1})
    target = {"a": torch.zeros(3), "b": make()}
    with pytest.raises(TreeError, match=f"b: {problem}"):
        _store(files).load(target)
    assert target["a"].count_nonzero() == 0
    assert math.isfinite(float(target["b"].sum()))
