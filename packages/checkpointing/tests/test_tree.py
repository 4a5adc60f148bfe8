"""What goes into a checkpoint comes out of it, bit for bit and type for type."""

import enum
import json
import math
import zlib
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from trainwright.checkpointing.errors import MismatchError, TreeError
from trainwright.checkpointing.state import Sharded, StateStore
from trainwright.checkpointing.state.tensor_file import FileRecord, TensorFile
from trainwright.checkpointing.testing.files import CrashingFiles
from trainwright.checkpointing.testing.layouts import DTYPES, random_tensors
from trainwright.collectives import ShardSpec


def _store():
    return StateStore("/runs/a", files=CrashingFiles(), block_bytes=16)


class Size(NamedTuple):
    a: int
    b: int


class Kind(enum.IntEnum):
    ONE = 1


def _held_by_itself():
    tree = {}
    tree["a"] = [tree]
    return tree


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64, torch.float8_e4m3fnuz], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)])
def test_every_dtype_and_shape_comes_back_bit_for_bit(dtype, shape):
    store = _store()
    tensor = random_tensors({"x": shape}, dtype, 0)["x"]
    target = torch.zeros_like(tensor)
    store.save(0, {"x": tensor})
    store.load({"x": target})
    assert target.shape == tensor.shape
    assert torch.equal(target.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


def test_packed_four_bit_floats_come_back_bit_for_bit():
    store = _store()
    bits = torch.arange(200, dtype=torch.uint8)
    target = torch.zeros(200, dtype=torch.uint8)
    store.save(0, {"x": bits.view(torch.float4_e2m1fn_x2)})
    store.load({"x": target.view(torch.float4_e2m1fn_x2)})
    assert torch.equal(bits, target)


def test_strided_and_conjugated_tensors_are_saved_and_filled_by_value():
    store = _store()
    base = torch.randn(4, 6)
    numbers = torch.randn(3, dtype=torch.complex64)
    store.save(0, {"t": base.T, "every": base[::2, 1::2], "conj": numbers.conj()})

    into = torch.zeros(4, 6)
    other = torch.zeros(4, 6)
    conj = torch.zeros(3, dtype=torch.complex64).conj()
    store.load({"t": into.T, "every": other[::2, 1::2], "conj": conj})

    assert torch.equal(into, base)
    assert torch.equal(other[::2, 1::2], base[::2, 1::2])
    assert other[1::2].count_nonzero() == 0
    assert torch.equal(conj, numbers.conj())


def test_parameters_are_filled_in_place_and_autograd_hears_of_it():
    store = _store()
    model = nn.Linear(3, 2)
    store.save(0, {"model": model.state_dict()})
    other = nn.Linear(3, 2)
    weight = other.weight
    loss = other(torch.ones(1, 3, requires_grad=True)).sum()

    store.load({"model": dict(other.named_parameters())})

    assert other.weight is weight
    assert weight.requires_grad
    assert weight.is_leaf
    assert torch.equal(weight, model.weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_tree_given_back_holds_the_same_tensors_and_the_saved_values():
    store = _store()
    leaf = Sharded(torch.ones(2), ShardSpec.full("anything", (2,)))
    store.save(0, {"a": {"x": leaf, "n": 3}, "y": torch.ones(1), "empty": {}})
    target = {"a": {"x": leaf, "n": None}, "y": torch.zeros(1), "empty": {}}

    loaded = store.load(target)

    assert loaded["a"]["x"] is leaf
    assert loaded["y"] is target["y"]
    assert loaded["a"]["n"] == 3
    assert loaded["empty"] == {}
    assert target["a"]["n"] is None


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ({"w": torch.zeros(3)}, r"w: expected \(3,\) float32, found \(2, 3\) float32"),
        ({"w": torch.zeros(2, 3).half()}, r"w: expected \(2, 3\) float16, found \(2, 3\) float32"),
        ({"v": torch.zeros(1)}, "v: expected a tensor, found nothing"),
        ({"v": torch.zeros(0)}, "v: expected a tensor, found nothing"),
        ({"v": 1}, "v: expected a plain value, found nothing"),
        ({"w": 1}, r"w: expected a plain value, found \(2, 3\) float32"),
        ({"n": torch.zeros(1)}, "n: expected a tensor, found a plain value"),
        ({}, "n: expected nothing of that path, found a plain value"),
        ({}, "w: expected nothing of that path, found a tensor"),
    ],
)
def test_what_does_not_fit_is_listed_with_path_expected_and_found(wanted, problem):
    store = _store()
    store.save(0, {"w": torch.ones(2, 3), "n": 1, "e": torch.zeros(0)})
    with pytest.raises(MismatchError, match=problem):
        store.load(wanted)


def test_all_that_does_not_fit_is_listed_at_once_and_nothing_is_written():
    store = _store()
    store.save(0, {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2), "n": 1})
    target = {"a": torch.zeros(2), "b": torch.zeros(3), "d": torch.zeros(2), "m": 0}

    with pytest.raises(MismatchError) as caught:
        store.load(target)

    lines = str(caught.value).splitlines()[1:]
    assert sorted(line.split(":")[0].strip() for line in lines) == ["b", "c", "d", "m", "n"]
    assert target["a"].count_nonzero() == 0


def test_a_list_of_problems_has_an_end():
    store = _store()
    store.save(0, {f"w{n}": torch.ones(1) for n in range(100)})
    with pytest.raises(MismatchError, match="and 80 more") as caught:
        store.load({})
    assert len(str(caught.value).splitlines()) == 22


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": {"b": {1}}}, r"a/b: .*got builtins\.set; write sorted\(value\)"),
        ({"a": [{"x": [1, b""]}]}, r"a\[0\]\.x\[1\]: .*got builtins.bytes"),
        ({"a": [{"__float__": {1: {2}}}]}, r"a\[0\]\['__float__'\]\[1\]: .*got builtins.set"),
        ({"a": math}, "a: .*got builtins.module"),
        ({"a": nn.Linear(1, 1)}, r"a: .*Linear; store what its state_dict\(\) returns"),
        ({"a": torch.Generator()}, r"a: .*Generator; store what its get_state\(\) returns"),
        ({"a": Size(1, 2)}, r"a: .*Size; write tuple\(value\), or a dictionary of its fields"),
        ({"a": Kind.ONE}, "a: .*Kind; write the enum member's name or value"),
        ({"a": [OrderedDict(b=1)]}, r"a\[0\]: .*OrderedDict; write dict\(value\)"),
        ({"a": np.array(["x"])}, "a: numpy array of <U1: can't convert"),
        ({"a": np.ones(4, dtype=">f4")}, "a: numpy array of >f4: given numpy array has byte order"),
        ({"a": nn.LazyLinear(2).weight}, "a: the parameter has no shape yet"),
        ({"a": {True: 1}}, "keys must be whole numbers, or strings, not empty"),
        ({"a": {1: 1, "1": 2}}, "a/1: two keys of the state have this path"),
        (_held_by_itself(), "nested too deeply, or holds itself"),
        ({"a/b": 1}, "without '/', got 'a/b'"),
        ({"": 1}, "not empty"),
        ({"__metadata__": 1}, "the file format keeps for itself"),
        ({"__crc32__": 1}, "the file format keeps for itself"),
        ({"a": torch.zeros(2, device="meta")}, "a: the tensor is on the meta device"),
        ({"a": torch.eye(2).to_sparse()}, "a: only dense tensors"),
        ([1], "must be a dictionary, got list"),
        ({"a": 10**5000}, "cannot be written as JSON"),
    ],
)
def test_what_cannot_be_stored_exactly_is_refused_with_its_path(tree, message):
    store = _store()
    with pytest.raises(TreeError, match=message):
        store.save(0, tree)
    assert store.steps() == []


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", None])
def test_a_step_must_be_a_natural_number(step):
    with pytest.raises(TreeError, match="step must be an integer from 0"):
        _store().save(step, {})


def test_a_sharded_leaf_must_fit_its_spec():
    with pytest.raises(TreeError, match=r"w: the spec says a local tensor of shape \(2, 3\)"):
        Sharded(torch.ones(3, 2), ShardSpec.full("w", (2, 3)))
    Sharded(torch.ones(6), ShardSpec.full("w", (2, 3)))


def test_tied_weights_load_into_tied_and_untied_models():
    store = _store()
    weight = torch.randn(3, 2)
    store.save(0, {"emb": weight, "head": weight})
    tied = torch.zeros(3, 2)
    emb, head = torch.zeros(3, 2), torch.zeros(3, 2)
    store.load({"emb": tied, "head": tied})
    store.load({"emb": emb, "head": head})
    assert all(torch.equal(found, weight) for found in (tied, emb, head))


def _tensors():
    shapes = {"model.w": (3, 4), "step": (), "none": (0, 2), "odd": (5,)}
    return {
        f"{name} {dtype}": tensor
        for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.float64, torch.bool)
        for name, tensor in random_tensors(shapes, dtype, 3).items()
    }


def test_the_safetensors_library_reads_our_files(tmp_path):
    tensors = _tensors()
    folder = StateStore(tmp_path, block_bytes=32).save(0, {"m": tensors})
    found = safetensors.torch.load_file(folder / "rank-00000.safetensors")
    del found["__crc32__"]
    assert found.keys() == {f"m/{name}" for name in tensors}
    for name, tensor in tensors.items():
        assert found[f"m/{name}"].dtype == tensor.dtype
        assert found[f"m/{name}"].shape == tensor.shape
        assert torch.equal(
            found[f"m/{name}"].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)
        )


def test_we_read_our_tensors_in_files_that_the_safetensors_library_wrote(tmp_path):
    tensors = _tensors()
    path = StateStore(tmp_path, block_bytes=32).save(0, tensors) / "rank-00000.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    again = CrashingFiles()
    data = safetensors.torch.save(safetensors.torch.load_file(path), metadata)
    again.make_folder(path.parent)
    again.create(path).write(data)

    header = data[: 8 + int.from_bytes(data[:8], "little")]
    offsets = json.loads(header[8:])["__crc32__"]["data_offsets"]
    table = data[len(header) :][slice(*offsets)]
    file = TensorFile(again, path, FileRecord(len(data), zlib.crc32(header), zlib.crc32(table)))
    file.verify()
    for name, tensor in tensors.items():
        target = torch.zeros(tensor.nbytes, dtype=torch.uint8)
        count = tensor.numel()
        file.read(name, [(slice(0, count), slice(0, count))] if count else [], target.numpy())
        assert torch.equal(target, tensor.view(-1).view(torch.uint8))
