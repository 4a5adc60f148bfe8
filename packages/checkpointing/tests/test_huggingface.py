"""Folders of safetensors files, against the safetensors library; only what is needed is read."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from trainwright.checkpointing.errors import (
    DamagedCheckpointError,
    MismatchError,
    NoCheckpointError,
    NotAvailableYetError,
    SaveFailedError,
    TreeError,
)
from trainwright.checkpointing.exchange import (
    open_dcp,
    open_huggingface,
    strided,
    write_dcp,
    write_huggingface,
)
from trainwright.checkpointing.exchange.readers import Folder
from trainwright.checkpointing.state import LocalFiles
from trainwright.checkpointing.testing.failing import FailingFiles
from trainwright.checkpointing.testing.files import CrashingFiles, SimulatedCrash
from trainwright.checkpointing.testing.layouts import DTYPES, layouts, random_tensors, shapes
from trainwright.collectives import Box, ShardSpec

PLACE = Path("/exports/a")
STANDARD = [dtype for dtype in DTYPES if dtype not in (torch.complex128, torch.float8_e8m0fnu)]


def bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def some_tensors():
    tensors = {str(dtype): random_tensors({"x": (3, 5)}, dtype, 1)["x"] for dtype in STANDARD}
    return tensors | {"scalar": torch.tensor(7), "empty": torch.zeros(2, 0)}


def test_what_the_safetensors_library_writes_is_read_bit_for_bit(tmp_path):
    tensors = some_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    with open_huggingface(tmp_path) as source:
        assert set(source.tensors) == set(tensors)
        assert all(same(source.tensors[name].read(), tensors[name]) for name in tensors)


def test_the_safetensors_library_reads_what_is_written_bit_for_bit(tmp_path):
    tensors = some_tensors() | {"strided": torch.arange(24).view(4, 6).t()[1::2]}
    written = write_huggingface(tmp_path / "c", tensors, max_file_bytes=100)

    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    count = len(set(index["weight_map"].values()))
    files = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        *files,
        "model.safetensors.index.json",
    ]
    assert index["weight_map"] == written.weight_map
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert index["metadata"]["total_size"] == written.total_size == total
    for file in files:
        found = load_file(tmp_path / "c" / file)
        assert set(found) == {name for name, place in written.weight_map.items() if place == file}
        assert all(same(found[name], tensors[name]) for name in found)
        assert len(found) == 1 or sum(tensor.nbytes for tensor in found.values()) <= 100
        with safe_open(tmp_path / "c" / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}


def test_a_folder_goes_through_dcp_and_back_without_a_tensor_held_twice(tmp_path):
    tensors = some_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    with open_huggingface(tmp_path) as source:
        write_dcp(tmp_path / "dcp", dict(source.tensors))
    with open_dcp(tmp_path / "dcp") as source:
        write_huggingface(tmp_path / "back", source.tensors)
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert set(found) == set(tensors)
    assert all(same(found[name], tensors[name]) for name in tensors)


@settings(max_examples=10)
@given(data=st.data())
def test_any_rank_of_any_layout_reads_its_part(data):
    of_shapes = data.draw(shapes())
    layout = data.draw(layouts(of_shapes))
    tensors = random_tensors(of_shapes, data.draw(st.sampled_from(STANDARD)), 2)
    with tempfile.TemporaryDirectory() as place:
        save_file(tensors, f"{place}/model.safetensors")
        with open_huggingface(place) as source:
            for rank in range(layout.world_size):
                target = layout.empty(rank, tensors)
                expected = layout.take(rank, tensors)
                rest = source.fill(target)
                assert set(rest) == set(tensors) - set(target)
                assert all(same(target[n].tensor, expected[n].tensor) for n in target)


class CountingFiles:
    """The files of this machine; counts the bytes that are read."""

    def __init__(self):
        self.num_bytes = 0

    def __getattr__(self, name):
        return getattr(LocalFiles(), name)

    def open(self, path):
        reader, files = LocalFiles().open(path), self

        class Counting:
            size = reader.size
            close = staticmethod(reader.close)

            def read_into(self, offset, buffer):
                files.num_bytes += len(buffer)
                return reader.read_into(offset, buffer)

        return Counting()


@pytest.mark.parametrize(
    "boxes",
    [
        [Box((100, 0), (200, 4096))],
        [Box((0, 0), (1000, 2048)), Box((1000, 1024), (1001, 1025))],
        [Box((0, 4000), (300, 4001))],  # one column: an element of each row
        [Box((0, 0), (1, 1)), Box((999, 0), (1000, 4096))],
        [Box((3, 3), (3, 9))],
    ],
)
def test_a_part_is_read_and_nothing_else(tmp_path, boxes):
    weight = torch.arange(1001 * 4096, dtype=torch.int32).view(1001, 4096)
    save_file({"w": weight, "x": torch.zeros(5000)}, tmp_path / "model.safetensors")
    files = CountingFiles()
    with open_huggingface(tmp_path, files=files) as source:
        files.num_bytes = 0
        spec = ShardSpec.of_boxes("w", weight.shape, boxes)
        assert same(source.tensors["w"].read(spec), spec.extract(weight))
    assert files.num_bytes == 4 * spec.numel


def test_small_gaps_are_read_along_because_the_disk_reads_them_anyway(tmp_path):
    weight = torch.arange(64 * 64).view(64, 64)
    save_file({"w": weight}, tmp_path / "model.safetensors")
    files = CountingFiles()
    with open_huggingface(tmp_path, files=files) as source:
        files.num_bytes = 0
        spec = ShardSpec.of_boxes("w", (64, 64), [Box((0, 2), (64, 62))])
        assert same(source.tensors["w"].read(spec), spec.extract(weight))
    assert files.num_bytes == 8 * (64 * 64 - 4)


def test_tied_weights_are_written_once_and_found_under_both_names(tmp_path):
    weight = torch.randn(4, 3)
    equal = weight.clone()
    tensors = {"emb": weight, "head": weight, "half": weight[:2], "equal": equal}
    written = write_huggingface(tmp_path / "c", tensors, tied={"other": "emb"})

    assert written.tied == {"head": "emb", "other": "emb"}
    assert set(written.weight_map) == {"emb", "half", "equal"}
    with open_huggingface(tmp_path / "c") as source:
        assert source.aliases == {"head": "emb", "other": "emb"}
        target = {"head": torch.zeros(4, 3), "half": torch.zeros(2, 3)}
        assert source.fill(target) == ("equal",)
        assert same(target["head"], weight)
        assert same(target["half"], weight[:2])


def test_what_the_library_says_of_tied_weights_is_understood(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    save_model(model, str(tmp_path / "model.safetensors"))
    with open_huggingface(tmp_path) as source:
        target = {"a.weight": torch.zeros(3, 3), "b.weight": torch.zeros(3, 3)}
        assert source.fill(target) == ()
        assert all(same(value, model["a"].weight) for value in target.values())


@pytest.mark.parametrize("stored", ["emb", "head"])
def test_a_tied_weight_that_a_folder_is_silent_about_is_found_by_the_name_that_is_there(
    tmp_path, stored
):
    save_file({stored: torch.arange(3)}, tmp_path / "model.safetensors")
    with open_huggingface(tmp_path) as source:
        target = {"emb": torch.zeros(3, dtype=torch.int64), "head": torch.zeros(3).long()}
        with pytest.raises(MismatchError, match="found nothing of that name"):
            source.fill(target)
        assert source.fill(target, tied={"head": "emb"}) == ()
    assert all(value.tolist() == [0, 1, 2] for value in target.values())


def test_pieces_that_torch_writes_in_this_format_are_put_together(tmp_path):
    whole = torch.randn(5, 4)
    for number, start in enumerate((0, 2)):
        part = whole[start : start + 2 + number].contiguous()
        told = json.dumps({"w": {"saved_offsets": [start, 0]}})
        name = f"shard-{number + 1:05d}-model-00001-of-00001.safetensors"
        save_file({"w": part}, tmp_path / name, {"DCP_SHARDING_INFO": told, "DCP_VERSION": "1.0"})
    with open_huggingface(tmp_path) as source:
        assert same(source.tensors["w"].read(), whole)
        spec = ShardSpec.full("w", (5, 4)).narrow(7, 10)
        assert same(source.tensors["w"].read(spec), spec.extract(whole))


def test_after_a_crash_the_folder_is_whole_or_not_there():
    tensors = {"a": torch.arange(3), "b": torch.ones(2, 2)}
    whole = CrashingFiles()
    write_huggingface(PLACE, tensors, max_file_bytes=24, files=whole)
    for count in range(whole.num_operations):
        files = CrashingFiles(count)
        with pytest.raises(SimulatedCrash):
            write_huggingface(PLACE, tensors, max_file_bytes=24, files=files)
        after = files.after_crash(count)
        if PLACE.name in after.names(PLACE.parent):
            with open_huggingface(PLACE, files=after) as source:
                assert all(same(source.tensors[name].read(), tensors[name]) for name in tensors)


def test_a_full_disk_leaves_nothing_behind():
    disk = CrashingFiles()
    files = FailingFiles(disk, "write", OSError(28, "No space left"), 200)
    with pytest.raises(SaveFailedError, match=r"was not written: .*No space left"):
        write_huggingface(PLACE, {"a": torch.ones(100)}, files=files)
    assert list(disk.paths()) == []


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": torch.ones(1, dtype=torch.complex128)}, "a: the safetensors format has no"),
        ({"__metadata__": torch.ones(1)}, "'__metadata__' cannot be the name"),
        ({"a": [1]}, "a: only whole tensors can be written, got list"),
        ({"a": torch.ones(1).to_sparse()}, "a: only dense tensors"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_before_anything_is_written(weights, message):
    files = CrashingFiles()
    with pytest.raises(TreeError, match=message):
        write_huggingface(PLACE, weights, files=files)
    assert files.num_operations == 0


def test_what_is_asked_for_and_not_there_is_told(tmp_path):
    with pytest.raises(NoCheckpointError, match="no folder with files"):
        open_huggingface(tmp_path / "absent")
    save_file({"a": torch.ones(1)}, tmp_path / "adapter.safetensors")
    with pytest.raises(NoCheckpointError, match=r"neither .*; there is adapter\.safetensors"):
        open_huggingface(tmp_path)
    index = {"weight_map": {"a": "adapter.safetensors", "b": "adapter.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DamagedCheckpointError, match=r"'b' is not in adapter\.safetensors"):
        open_huggingface(tmp_path)
    index["weight_map"] = {"a": "other.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DamagedCheckpointError, match=r"other\.safetensors is missing"):
        open_huggingface(tmp_path)


def test_a_dtype_that_nobody_knows_is_named_with_its_tensor(tmp_path):
    text = b'{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\0")
    with pytest.raises(NotAvailableYetError, match="'a' has the dtype 'F4'"):
        open_huggingface(tmp_path)


def test_a_target_of_another_shape_or_dtype_is_refused(tmp_path):
    save_file({"a": torch.ones(2, 3, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    with open_huggingface(tmp_path) as source:
        found = source.tensors["a"]
        with pytest.raises(MismatchError, match="expected shape"):
            found.read(ShardSpec.full("a", (3, 2)))
        with pytest.raises(MismatchError, match="has shape"):
            found.read(into=torch.zeros(5, dtype=torch.bfloat16))
        with pytest.raises(MismatchError, match="cast=True converts"):
            found.read(into=torch.zeros(2, 3))
        strided = torch.zeros(3, 4)[:, ::2].t()
        found.read(into=strided, cast=True)
        assert strided.tolist() == [[1.0] * 3] * 2


@settings(max_examples=15)
@given(data=st.data())
def test_boxes_of_any_strides_are_copied_with_reads_of_any_size(data):
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    stride = tuple(data.draw(st.integers(0, 30)) for _ in sizes)
    corners = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in sizes]
    box = Box([low for low, _ in corners], [high for _, high in corners])
    numbers = torch.arange(400, dtype=torch.int16)
    whole = numbers.as_strided(sizes, stride, 7)
    files = CrashingFiles()
    files.make_folder(PLACE)
    files.create(PLACE / "x").write(numbers.numpy().tobytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strided, "_READ_BYTES", data.draw(st.sampled_from([2, 10, 60])))
        patch.setattr(strided, "_PAGE_BYTES", data.draw(st.sampled_from([0, 8])))
        into = torch.zeros(box.shape, dtype=torch.int16)
        reader = Folder(PLACE, files).file("x")
        where = strided.Strided(reader, 14, torch.int16, tuple(sizes), stride, "x")
        where.copy(box, into)
    assert torch.equal(into, whole[box.slices])
