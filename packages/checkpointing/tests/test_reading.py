"""A tool looks into a checkpoint without a model, and reads no more than it asks for."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.checkpointing.errors import (
    DamagedCheckpointError,
    MismatchError,
    NoCheckpointError,
)
from trainwright.checkpointing.state import StateStore, open_checkpoint
from trainwright.checkpointing.testing.files import CrashingFiles
from trainwright.checkpointing.testing.layouts import layouts, random_tensors, shapes
from trainwright.collectives import Box, LocalWorld, ShardSpec

ROOT = Path("/runs/a")


def _bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


@settings(max_examples=10)
@given(data=st.data())
def test_one_process_reads_whole_tensors_and_parts_of_what_any_layout_saved(data):
    of_shapes = data.draw(shapes())
    layout, other = data.draw(layouts(of_shapes)), data.draw(layouts(of_shapes))
    tensors = random_tensors(of_shapes, torch.bfloat16, 1)
    files = CrashingFiles()

    def save(comm):
        coordinates = layout.coordinates(comm.rank)
        store = StateStore(ROOT, comm, coordinates=coordinates, files=files, block_bytes=16)
        store.save(3, {"model": layout.take(comm.rank, tensors), "n": 7})

    LocalWorld(layout.world_size).run(save)
    with open_checkpoint(ROOT, files=files) as checkpoint:
        assert (checkpoint.step, checkpoint.plain) == (3, {"n": 7})
        assert list(checkpoint.tensors) == sorted(f"model/{path}" for path in tensors)
        for path, tensor in tensors.items():
            entry = checkpoint.tensors[f"model/{path}"]
            assert (entry.dtype, entry.shape) == (tensor.dtype, tuple(tensor.shape))
            assert entry.num_bytes == tensor.nbytes
            assert sum(piece.spec.numel for piece in entry.pieces) == tensor.numel()
            assert torch.equal(_bits(checkpoint.read(f"model/{path}")), _bits(tensor))
        for path, spec in other.specs[0].items():
            part = checkpoint.read(f"model/{path}", spec)
            assert part.shape == spec.local_shape
            assert torch.equal(_bits(part), _bits(spec.extract(tensors[path])))


@pytest.mark.filterwarnings("ignore:.*checkpoints of other runs")
def test_a_checkpoint_is_chosen_by_step_and_run_as_a_store_chooses():
    files = CrashingFiles()
    for run, step in [("a", 1), ("b", 2), ("a", 3)]:
        StateStore(ROOT, files=files, run=run).save(step, {"w": torch.full((2,), float(step))})
    assert open_checkpoint(ROOT, files=files).step == 3
    assert open_checkpoint(ROOT, run="b", files=files).read("w").tolist() == [2, 2]
    assert open_checkpoint(ROOT, 1, files=files).run == "a"
    with pytest.raises(NoCheckpointError, match="no complete checkpoint of step 2 of run 'a'"):
        open_checkpoint(ROOT, 2, "a", files=files)


def test_a_name_or_shape_that_is_not_there_is_refused():
    files = CrashingFiles()
    StateStore(ROOT, files=files).save(1, {"w": torch.ones(2, 3)})
    checkpoint = open_checkpoint(ROOT, files=files)
    with pytest.raises(MismatchError, match="holds no tensor 'v'"):
        checkpoint.read("v")
    with pytest.raises(MismatchError, match=r"w: expected a spec of the shape \(2, 3\)"):
        checkpoint.read("w", ShardSpec.full("w", (3, 2)))


def test_a_flipped_bit_is_found_by_the_read_that_meets_it_and_by_no_other():
    files = CrashingFiles()
    StateStore(ROOT, files=files, block_bytes=16).save(1, {"w": torch.arange(64.0)})
    (path,) = [path for path in files.paths() if path.suffix == ".safetensors"]
    checkpoint = open_checkpoint(ROOT, files=files)
    start = files.size(path) - 64 * 4 - 16 * 4
    files.flip_bit(path, 8 * (start + 17))

    def rows(start, stop):
        return ShardSpec.of_boxes("w", (64,), [Box((start,), (stop,))])

    assert checkpoint.read("w", rows(8, 64)).tolist() == list(range(8, 64))
    with pytest.raises(DamagedCheckpointError, match="expected checksum"):
        checkpoint.read("w", rows(0, 8))
