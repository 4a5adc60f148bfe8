"""The formats are fixed: files that any release wrote load for ever."""

import json
from pathlib import Path

import pytest
import torch

from trainwright.checkpointing.state import LocalFiles, Sharded, StateStore
from trainwright.checkpointing.state.catalog import read_catalog
from trainwright.checkpointing.state.index_reading import locate
from trainwright.checkpointing.state.ranks import Ranks
from trainwright.collectives import Box, LocalWorld, ShardSpec

FIRST = Path(__file__).parent / "format_1"
SECOND = Path(__file__).parent / "format_2"


def state(rank):
    """The state in both: two tensor-parallel ranks that also cut the moments in two."""
    rows = Box((2 * rank, 0), (2 * rank + 2, 3))
    weight = ShardSpec.of_boxes("w", (4, 3), [rows])
    fused = ShardSpec.of_boxes(
        "f", (8,), [Box((2 * rank,), (2 * rank + 2,)), Box((4 + 2 * rank,), (6 + 2 * rank,))]
    )
    moments = ShardSpec.full("m", (4, 3)).narrow(5 * rank, 5 + 7 * rank)
    numbers = torch.arange(12.0).view(4, 3)
    return {
        "model": {
            "w": Sharded(weight.extract(numbers), weight),
            "f": Sharded(fused.extract(torch.arange(8, dtype=torch.bfloat16)), fused),
        },
        "m": Sharded(moments.extract(numbers.double() / 3), moments),
        "count": torch.tensor(7),
        "step": 12,
        "position": [2**70, 0.1, float("inf"), None, True, "\u00e9"],
    }


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("folder", [FIRST, SECOND])
def test_a_checkpoint_of_either_format_loads(folder, num_ranks):
    for loaded in LocalWorld(num_ranks).run(lambda comm: load_all(folder, comm)):
        claim_is_whole(loaded)


def load_all(folder, comm):
    target = {
        "model": {"w": torch.zeros(4, 3), "f": torch.zeros(8, dtype=torch.bfloat16)},
        "m": torch.zeros(4, 3, dtype=torch.float64),
        "count": torch.tensor(0),
        "step": None,
        "position": None,
    }

    return StateStore(folder, comm).load(target)


def claim_is_whole(loaded):
    numbers = torch.arange(12.0).view(4, 3)
    assert torch.equal(loaded["model"]["w"], numbers)
    assert torch.equal(loaded["model"]["f"], torch.arange(8, dtype=torch.bfloat16))
    assert torch.equal(loaded["m"], numbers.double() / 3)
    assert loaded["count"] == 7
    assert loaded["step"] == 12
    assert loaded["position"] == [2**70, 0.1, float("inf"), None, True, "\u00e9"]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_of_both_formats_the_same_is_found_at_the_same_places(num_ranks):
    paths = ("model/w", "model/f", "m", "count")

    def find(comm, root):
        (saved,) = read_catalog(LocalFiles(), root).complete
        return locate(Ranks(comm), LocalFiles(), saved, dict.fromkeys(paths))

    world = LocalWorld(num_ranks)
    for first, second in zip(world.run(find, FIRST), world.run(find, SECOND), strict=True):
        assert first == second
        assert None not in first.values()


def test_the_same_state_is_still_written_byte_for_byte(tmp_path):
    LocalWorld(2).run(
        lambda comm: StateStore(tmp_path, comm, run="first", block_bytes=32).save(
            12, state(comm.rank)
        )
    )
    (written,) = tmp_path.iterdir()
    (second,) = SECOND.iterdir()
    names = sorted(path.name for path in second.iterdir())
    data = ["rank-00000.safetensors", "rank-00001.safetensors"]
    assert names == ["index-00000.json", "manifest.json", *data]
    for name in names:
        assert (written / name).read_bytes() == (second / name).read_bytes()


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.safetensors"])
def test_a_header_is_plain_json(name):
    (second,) = SECOND.iterdir()
    data = (second / name).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert json.loads(header["__metadata__"]["trainwright"])["block_bytes"] == 32
