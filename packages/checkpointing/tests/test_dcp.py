"""PyTorch's DCP folders are read bit for bit, and PyTorch reads those that are written here."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.tensor import DTensor, Shard

from trainwright.checkpointing.errors import (
    DamagedCheckpointError,
    LoadFailedError,
    MismatchError,
    NoCheckpointError,
    NotAvailableYetError,
    SaveFailedError,
    TreeError,
    UntrustedError,
)
from trainwright.checkpointing.exchange import open_dcp, write_dcp, write_huggingface
from trainwright.checkpointing.state import Sharded
from trainwright.checkpointing.testing.failing import FailingFiles
from trainwright.checkpointing.testing.files import CrashingFiles, SimulatedCrash
from trainwright.checkpointing.testing.layouts import DTYPES, layouts, random_tensors, shapes
from trainwright.collectives import Box, LocalWorld, ShardSpec

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
PLACE = Path("/exports/a")


def bits(tensor):
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def test_every_dtype_and_stride_that_torch_saves_is_read_bit_for_bit(tmp_path):
    state = {str(dtype): random_tensors({"x": (3, 2)}, dtype, 1)["x"] for dtype in DTYPES}
    state |= {
        "scalar": torch.tensor(7, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "transposed": torch.arange(24).view(4, 6).t(),
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "expanded": torch.randn(1, 3).expand(4, 3),
        "part": torch.arange(100.0)[10:20:3],
        "parameter": nn.Parameter(torch.randn(3)),
    }
    dcp.save(dict(state), checkpoint_id=tmp_path / "c")

    with open_dcp(tmp_path / "c") as source:
        assert {name: tensor.shape for name, tensor in source.tensors.items()} == {
            name: tuple(tensor.shape) for name, tensor in state.items()
        }
        for name, tensor in state.items():
            assert same(source.tensors[name].read(), tensor), name


@pytest.mark.parametrize(
    "pickled",
    [
        lambda self, _: (getattr, (type(self), self.name)),
        lambda self, _: (type(self), (self.value,)),
    ],
    ids=["Python 3.11.0", "Python 3.11.7"],
)
def test_a_folder_is_read_whichever_python_pickled_its_enums(tmp_path, monkeypatch, pickled):
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", pickled)
    weight = torch.randn(2, 3)
    dcp.save({"w": weight}, checkpoint_id=tmp_path / "c")

    with open_dcp(tmp_path / "c") as source:
        assert same(source.tensors["w"].read(), weight)


def test_values_of_an_optimizers_state_come_with_the_keys_that_lead_to_them(tmp_path):
    group = {"lr": 0.25, "betas": (0.9, 0.999), "params": [0, 1]}
    optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [group]}
    odd = {"bytes": b"ab", "set": {1}, "pair": (torch.arange(3), {"x": None}), "big": 2**70}
    dcp.save({"o": optimizer, "odd": odd}, checkpoint_id=tmp_path / "c")

    with open_dcp(tmp_path / "c") as source:
        values = {name: entry.read() for name, entry in source.objects.items()}
        assert values["o.param_groups.0.lr"] == 0.25
        assert values["o.param_groups.0.betas"] == (0.9, 0.999)
        assert source.paths["o.state.0.exp_avg"] == ("o", "state", "0", "exp_avg")
        assert (values["odd.bytes"], values["odd.set"], values["odd.big"]) == (b"ab", {1}, 2**70)
        assert values["odd.pair"][0].tolist() == [0, 1, 2]
        assert values["odd.pair"][1] == {"x": None}


@settings(max_examples=6)
@given(data=st.data())
def test_what_any_layout_writes_is_loaded_by_torch_and_by_any_other_layout_here(data):
    of_shapes = data.draw(shapes())
    layout, other = data.draw(layouts(of_shapes)), data.draw(layouts(of_shapes))
    tensors = random_tensors(of_shapes, data.draw(st.sampled_from(DTYPES)), 3)

    with tempfile.TemporaryDirectory() as place:

        def write(comm):
            tree = {"model": layout.take(comm.rank, tensors), "n": [1, 2.5, None]}
            at = layout.coordinates(comm.rank)
            write_dcp(f"{place}/c", tree, comm=comm, coordinates=at)

        LocalWorld(layout.world_size).run(write)
        target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        loaded = {"model": target, "n": None}
        dcp.load(loaded, checkpoint_id=f"{place}/c")
        assert loaded["n"] == [1, 2.5, None]
        assert all(same(target[name], tensor) for name, tensor in tensors.items())
        with open_dcp(f"{place}/c", verify=data.draw(st.booleans())) as source:
            for rank in range(other.world_size):
                for name, spec in other.specs[rank].items():
                    part = source.tensors[f"model.{name}"].read(spec)
                    assert same(part, spec.extract(tensors[name]))


@pytest.mark.parametrize("size", [1, 2])
def test_torch_loads_our_pieces_into_dtensors(tmp_path, size):
    whole = torch.arange(35.0).view(7, 5)

    def write(comm):
        spec = ShardSpec.full("w", (7, 5)).narrow(17 * comm.rank, 17 + 18 * comm.rank)
        write_dcp(tmp_path / "c", {"w": Sharded(spec.extract(whole), spec)}, comm=comm)

    LocalWorld(2).run(write)
    for rank in range(size):
        dist.init_process_group("fake", rank=rank, world_size=size)
        try:
            mesh = dist.init_device_mesh("cpu", (size,))
            spec = ShardSpec.full("w", (7, 5)) if size == 1 else _columns(rank)
            local = torch.zeros(spec.local_shape)
            w = DTensor.from_local(
                local, mesh, [Shard(1)], run_check=False, shape=(7, 5), stride=(5, 1)
            )
            dcp.load({"w": w}, checkpoint_id=tmp_path / "c", no_dist=True)
        finally:
            dist.destroy_process_group()
        assert same(local, spec.extract(whole))


def _columns(rank):
    return ShardSpec.of_boxes("w", (7, 5), [Box((0, 3 * rank), (7, 3 + 2 * rank))])


def test_after_a_crash_the_folder_is_whole_or_not_there():
    tree = {"w": torch.arange(6.0).view(2, 3), "n": 1}
    whole = CrashingFiles()
    write_dcp(PLACE, tree, files=whole)
    outcomes = set()
    for count in range(whole.num_operations):
        files = CrashingFiles(count)
        with pytest.raises(SimulatedCrash):
            write_dcp(PLACE, tree, files=files)
        for seed in range(2):
            after = files.after_crash(seed)
            there = PLACE.name in after.names(PLACE.parent)
            outcomes.add(there)
            if there:
                with open_dcp(PLACE, files=after) as source:
                    assert same(source.tensors["w"].read(), tree["w"])
                    assert source.objects["n"].read() == 1
    assert outcomes == {False, True}


def test_what_one_rank_cannot_write_is_an_error_on_all_and_leaves_nothing():
    disk = CrashingFiles()

    def write(comm):
        full = FailingFiles(disk, "write", OSError(28, "No space left"), 100)
        files = full if comm.rank == 1 else disk
        with pytest.raises(SaveFailedError, match=r"rank 1: .*No space left"):
            write_dcp(PLACE, {"w": _half(comm)}, comm=comm, files=files)

    LocalWorld(2).run(write)
    assert list(disk.paths()) == []
    assert disk.names(PLACE.parent) == []


def _half(comm):
    spec = ShardSpec.full("w", (10,)).narrow(5 * comm.rank, 5 * comm.rank + 5)
    return Sharded(torch.ones(5), spec)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": {"b": 1}, "a.b": 2}, "are both 'a.b'"),
        ({"a": Sharded(torch.ones(2), ShardSpec.full("a", (4,)).narrow(0, 2))}, "hold 2 of 4"),
        ({"a": object()}, "a: only tensors and plain values"),
        ({"a": torch.ones(2, device="meta")}, "a: only dense local tensors"),
        ({"a": torch.ones(2).to_sparse()}, "a: only dense local tensors"),
        ([], "must be a dictionary"),
    ],
)
def test_a_tree_that_cannot_be_written_is_refused_before_anything_is(tree, message):
    files = CrashingFiles()
    with pytest.raises(TreeError, match=message):
        write_dcp(PLACE, tree, files=files)
    assert files.num_operations == 0


def test_two_ranks_that_write_the_same_elements_are_told_on_both():
    def write(comm):
        spec = ShardSpec.full("w", (4,))
        with pytest.raises(TreeError, match="w: two ranks write the same elements"):
            write_dcp(PLACE, {"w": Sharded(torch.ones(4), spec)}, comm=comm, files=CrashingFiles())

    LocalWorld(2).run(write)


def test_a_folder_that_is_there_is_not_written_over(tmp_path):
    (tmp_path / "c").mkdir()
    with pytest.raises(TreeError, match="is there already"):
        write_dcp(tmp_path / "c", {"w": torch.ones(2)})
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_flipped_bit_of_a_piece_is_found_unless_asked_not_to_look(tmp_path):
    write_dcp(tmp_path / "c", {"w": torch.arange(100.0)})
    path = tmp_path / "c" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[data.index(torch.arange(100.0).numpy().tobytes()) + 5] ^= 4
    path.write_bytes(data)

    with (
        open_dcp(tmp_path / "c") as source,
        pytest.raises(DamagedCheckpointError, match="checksum"),
    ):
        source.tensors["w"].read()
    with open_dcp(tmp_path / "c", verify=False) as source:
        assert source.tensors["w"].read()[2:].tolist() == list(range(2, 100))


def test_a_damaged_source_leaves_no_half_written_folder(tmp_path):
    write_dcp(tmp_path / "c", {"w": torch.arange(100.0)})
    path = tmp_path / "c" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[data.index(torch.arange(100.0).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    with open_dcp(tmp_path / "c") as source:
        for write in (write_dcp, write_huggingface):
            with pytest.raises(DamagedCheckpointError, match="checksum"):
                write(tmp_path / "d", dict(source.tensors))
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_fill_lists_all_that_does_not_fit_and_says_what_nobody_wanted(tmp_path):
    write_dcp(tmp_path / "c", {"a": torch.ones(3), "b": torch.ones(2, 2), "c": torch.ones(1)})
    with open_dcp(tmp_path / "c") as source:
        target = {"a": torch.zeros(3, dtype=torch.float64), "b": torch.zeros(4), "x": torch.ones(1)}
        with pytest.raises(MismatchError, match=r"(?s)a: expected.*b: expected.*x: expected"):
            source.fill(target)
        spec = ShardSpec.full("b", (2, 2)).narrow(1, 3)
        part = torch.zeros(2)
        rest = source.fill({"a": target["a"], "b": Sharded(part, spec)}, cast=True)
        assert rest == ("c",)
        assert target["a"].tolist() == [1, 1, 1]
        assert part.tolist() == [1, 1]


def test_what_is_no_dcp_folder_is_told_apart(tmp_path):
    with pytest.raises(NoCheckpointError, match="no folder with files"):
        open_dcp(tmp_path / "absent")
    (tmp_path / "__0_0.distcp").write_bytes(b"x")
    with pytest.raises(NoCheckpointError, match="its save never ended"):
        open_dcp(tmp_path)
    (tmp_path / "__0.metadata").write_bytes(b"x")
    with pytest.raises(NotAvailableYetError, match="use_collectives=False"):
        open_dcp(tmp_path)


def test_an_object_of_a_class_is_refused_by_its_name(tmp_path):
    dcp.save({"x": Path("a"), "w": torch.ones(1)}, checkpoint_id=tmp_path / "c")
    with open_dcp(tmp_path / "c") as source:
        with pytest.raises(UntrustedError, match=r"'x' asks for the name 'pathlib\.PosixPath'"):
            source.objects["x"].read()
        assert source.tensors["w"].read().tolist() == [1]
    with pytest.raises(LoadFailedError, match="closed"):
        source.tensors["w"].read()
