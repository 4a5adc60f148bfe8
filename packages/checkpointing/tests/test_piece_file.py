"""A piece is read by its place alone, and no more of the file than its elements need."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.checkpointing.errors import DamagedCheckpointError
from trainwright.checkpointing.state.index import DataFile, Piece
from trainwright.checkpointing.state.piece_file import PieceFile
from trainwright.checkpointing.state.tensor_file import plan_file, write_planned_file
from trainwright.checkpointing.state.tree import take_leaves
from trainwright.checkpointing.testing.files import CrashingFiles
from trainwright.collectives import ShardSpec

FILE = Path("/d/rank-00000.safetensors")
BLOCK = 32


class Watched(CrashingFiles):
    """Files that note which bytes were looked at."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def open(self, path):
        reader, seen = super().open(path), self.seen

        class Reader:
            size = reader.size

            def view(self, offset, count):
                seen.append((offset, offset + count))
                return reader.view(offset, count)

            def close(self):
                reader.close()

        return Reader()


def _written(tensors):
    """Return the files with one file of these tensors, and where the plan says they lie."""
    files = Watched()
    files.make_folder(FILE.parent)
    plan = plan_file(take_leaves(tensors).tensors.values(), BLOCK)
    record = write_planned_file(files, FILE, plan)
    data_file = DataFile(0, record.size, BLOCK)
    pieces = {
        placed.leaf.path: Piece(
            data_file, ShardSpec.full(placed.leaf.path, placed.leaf.tensor.shape), *place
        )
        for placed in plan.leaves
        for place in [(placed.offset, placed.sums)]
    }
    return files, pieces


@settings(max_examples=15)
@given(data=st.data())
def test_any_runs_of_a_piece_are_those_elements_and_only_their_blocks_are_read(data):
    dtype = data.draw(st.sampled_from([torch.uint8, torch.int16, torch.float32]))
    length = data.draw(st.integers(1, 100))
    tensors = {
        "a": torch.arange(length).to(dtype),
        "b": torch.ones(7, dtype=torch.float64),
        "none": torch.ones(0),
    }
    files, pieces = _written(tensors)
    ends = sorted(data.draw(st.lists(st.integers(0, length), min_size=2, max_size=8)))
    wanted = [slice(*pair) for pair in itertools.pairwise(ends)][::2]
    target = torch.full((length + 3,), 99).to(dtype)
    expected = target.clone()
    runs, at = [], 3
    for source in wanted:
        count = source.stop - source.start
        runs.append((source, slice(at, at + count)))
        expected[at : at + count] = tensors["a"][source]
        at += count

    with PieceFile.open(files, FILE, pieces["a"].file) as file:
        file.read(pieces["a"], dtype, runs, target.view(torch.uint8).numpy())

    assert torch.equal(target, expected)
    size, offset = dtype.itemsize, pieces["a"].offset
    numbers = {byte // BLOCK for run in wanted for byte in range(run.start * size, run.stop * size)}
    seen = {(begin - offset) // BLOCK for begin, _ in files.seen if begin < pieces["a"].sums}
    assert seen == numbers
    assert len([begin for begin, _ in files.seen if begin >= pieces["a"].sums]) == bool(numbers)


def test_a_block_that_was_damaged_is_named_and_none_of_its_elements_copied():
    files, pieces = _written({"w": torch.arange(16.0)})
    piece = pieces["w"]
    files.flip_bit(FILE, 8 * (piece.offset + BLOCK))
    target = np.zeros(64, np.uint8)

    with PieceFile.open(files, FILE, piece.file) as file:
        with pytest.raises(DamagedCheckpointError, match="tensor 'w', bytes 32 to 64 of its part"):
            file.read(piece, torch.float32, [(slice(0, 16), slice(0, 16))], target)
        with pytest.raises(DamagedCheckpointError):
            file.verify(piece, torch.float32)

    assert target[4:32].any()
    assert not target[32:].any()


def test_a_file_of_another_length_is_not_opened():
    files, pieces = _written({"w": torch.arange(16.0)})
    files.truncate(FILE, files.size(FILE) - 1)
    with pytest.raises(DamagedCheckpointError, match="length: expected"):
        PieceFile.open(files, FILE, pieces["w"].file)
