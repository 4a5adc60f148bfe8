"""Nothing that was damaged or forged is loaded, and the errors say what is wrong."""

import contextlib
import json
import re
import zlib
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainwright.checkpointing.errors import (
    CheckpointingError,
    CheckpointingWarning,
    DamagedCheckpointError,
    NoCheckpointError,
)
from trainwright.checkpointing.state import Sharded, StateStore
from trainwright.checkpointing.state.catalog import Saved
from trainwright.checkpointing.state.header import parse_header
from trainwright.checkpointing.state.manifest import (
    IndexRecord,
    Manifest,
    decode_manifest,
    read_manifest,
)
from trainwright.checkpointing.state.reading import Checkpoint
from trainwright.checkpointing.state.tensor_file import plan_header
from trainwright.checkpointing.state.tree import take_leaves
from trainwright.checkpointing.testing.files import CrashingFiles
from trainwright.checkpointing.testing.forgeries import VALUES, forgeries
from trainwright.collectives import Box, ShardSpec

ROOT = Path("/runs/a")
HERE = Path("there")
MANIFEST = Manifest("r", 1, 1, {"a": 1}, 2, (IndexRecord(9, 1), IndexRecord(8, 2)))


def _saved():
    files = CrashingFiles()
    store = StateStore(ROOT, files=files, run="r", block_bytes=32)
    for step in (1, 2):
        folder = store.save(step, _state(step))
    return files, store, folder


def _state(step):
    return {"w": torch.arange(20.0) + step, "b": torch.tensor(step), "step": step}


def _load(store, step=None):
    target = {"w": torch.zeros(20), "b": torch.tensor(0), "step": 0}
    return store.load(target, step)


@settings(max_examples=30)
@given(data=st.data())
def test_no_flipped_bit_is_ever_loaded(data):
    files, store, folder = _saved()
    path = data.draw(st.sampled_from([path for path in files.paths() if path.parent == folder]))
    files.flip_bit(path, data.draw(st.integers(0, 8 * files.size(path) - 1)))

    if store.latest() == 2:
        with pytest.raises(DamagedCheckpointError, match=re.escape(str(path))):
            store.verify()
        # A load has no use for the headers of files of tensors, and need not find what is there.
        loaded = None
        with contextlib.suppress(DamagedCheckpointError):
            loaded = _load(store)
        expected = _state(2)
        assert loaded is None or all(torch.equal(loaded[k], expected[k]) for k in ("w", "b"))
    assert _load(store, 1)["step"] == 1


def test_a_flipped_bit_in_any_byte_of_a_checkpoint_is_found():
    files, store, folder = _saved()
    for path in [path for path in files.paths() if path.parent == folder]:
        for number in range(files.size(path)):
            position = 8 * number + number % 8
            files.flip_bit(path, position)
            if store.latest() == 2:
                with pytest.raises(DamagedCheckpointError, match="is damaged"):
                    store.verify()
            files.flip_bit(path, position)
    store.verify()


def test_a_damaged_table_of_checksums_is_not_mistaken_for_a_damaged_tensor():
    files, store, folder = _saved()
    path = folder / "rank-00000.safetensors"
    files.flip_bit(path, 8 * files.size(path) - 1)
    with pytest.raises(DamagedCheckpointError, match="is damaged: table of checksums: expected"):
        store.verify()


def test_a_damaged_block_names_file_tensor_and_both_checksums():
    files, store, folder = _saved()
    path = folder / "rank-00000.safetensors"
    data = bytearray(files._file(path).data)
    at = data.index(_state(2)["w"].numpy().tobytes()[32:64])
    good = zlib.crc32(data[at : at + 32])
    files.flip_bit(path, 8 * at + 3)
    bad = zlib.crc32(files._file(path).data[at : at + 32])

    message = f"{path} is damaged: tensor 'w'.*checksum {good:08x}, found {bad:08x}"
    with pytest.raises(DamagedCheckpointError, match=message):
        _load(store)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "index-00000.json", "manifest.json"])
@pytest.mark.parametrize("kept", ["no file", "nothing", "all but a byte"])
def test_a_shortened_file_makes_the_checkpoint_incomplete_and_the_one_before_the_latest(name, kept):
    files, store, folder = _saved()
    if kept == "no file":
        del files._folder(folder).names[name]
    else:
        files.truncate(folder / name, 0 if kept == "nothing" else files.size(folder / name) - 1)

    assert store.latest() == 1
    with pytest.warns(CheckpointingWarning, match=f"passed over: .*{re.escape(name)}"):
        loaded = _load(store)
    assert loaded["step"] == 1
    assert torch.equal(loaded["w"], _state(1)["w"])
    assert any(str(folder / name) in leftover for leftover in store.leftovers())
    with pytest.raises(NoCheckpointError, match=re.escape(str(folder / name))):
        _load(store, 2)
    with pytest.raises((DamagedCheckpointError, NoCheckpointError), match=re.escape(name)):
        store.verify(2)
    store.save(3, _state(3))
    assert _load(store, 3)["step"] == 3


def test_damage_beside_the_wanted_part_does_not_hinder_a_load():
    files = CrashingFiles()
    store = StateStore(ROOT, files=files, block_bytes=32)
    path = store.save(1, {"w": torch.arange(64.0)}) / "rank-00000.safetensors"
    data = bytes(files._file(path).data)
    files.flip_bit(path, 8 * data.index(torch.arange(8.0).numpy().tobytes()))
    spec = ShardSpec.of_boxes("w", (64,), [Box((32,), (64,))])
    target = torch.zeros(32)

    store.load({"w": Sharded(target, spec)})

    assert torch.equal(target, torch.arange(32.0, 64.0))
    with pytest.raises(DamagedCheckpointError):
        store.load({"w": torch.zeros(64)})


def test_a_newer_format_version_says_so():
    data = MANIFEST.encode().replace(b'"version":2', b'"version":3')
    body = data[len('{"crc32":"00000000","body":') : -2]
    data = b'{"crc32":"%08x","body":%s}\n' % (zlib.crc32(body), body)
    with pytest.raises(DamagedCheckpointError, match="format version 3; this package reads"):
        decode_manifest(data, HERE)


def _header():
    spec = ShardSpec.of_boxes("w", (4, 6), [Box((0, 0), (4, 3))], ("dp",))
    leaves = take_leaves(
        {"w": Sharded(torch.zeros(4, 3), spec), "b": torch.tensor(1.0, dtype=torch.complex128)}
    )
    header, _ = plan_header(leaves.tensors.values(), 16)
    return json.loads(header[8:]), 48 + 16 + 4 * 4


def test_the_header_that_the_forgeries_start_from_is_sound():
    header, data_bytes = _header()
    assert set(parse_header(json.dumps(header), data_bytes, HERE).tensors) == {"w", "b"}


@settings(max_examples=100)
@given(data=st.data())
def test_a_forged_header_raises_the_packages_error_and_no_other(data):
    header, data_bytes = _header()
    ours = json.loads(header["__metadata__"]["trainwright"])
    if data.draw(st.booleans()):
        header = data.draw(forgeries(header))
    else:
        ours = data.draw(forgeries(ours))
        header["__metadata__"]["trainwright"] = json.dumps(ours)

    try:
        parsed = parse_header(json.dumps(header), data_bytes, HERE)
    except DamagedCheckpointError:
        return
    for info in parsed.tensors.values():
        assert 0 <= info.begin <= info.end <= data_bytes
        assert info.spec.numel * info.dtype.itemsize == info.end - info.begin


@settings(max_examples=40)
@given(text=st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()))
@example(text=b"[" * 100_000)
@example(text=b"9" * 5000)
@example(text=b'{"a":1,"a":2}')
@example(text=b"\xff\xfe")
def test_bytes_that_are_no_header_raise_the_packages_error_and_no_other(text):
    with pytest.raises(DamagedCheckpointError, match="there is damaged"):
        parse_header(text, 0, HERE)


@settings(max_examples=50)
@given(data=st.data())
def test_a_forged_manifest_raises_the_packages_error_and_no_other(data):
    body = json.loads(MANIFEST.encode())["body"]
    if data.draw(st.booleans()):
        del body["num_files"], body["index"]
        body.update(version=1, files=[[9, 1, 2], None])
    body = data.draw(forgeries(body))
    text = json.dumps(body).encode()

    try:
        manifest = decode_manifest(b'{"crc32":"%08x","body":%s}\n' % (zlib.crc32(text), text), HERE)
    except DamagedCheckpointError:
        return
    assert manifest.step >= 0


def test_a_header_length_beyond_the_file_is_refused_before_memory_is_taken():
    files, store, folder = _saved()
    path = folder / "rank-00000.safetensors"
    file = files._file(path)
    file.data[:8] = (2**62).to_bytes(8, "little")
    with pytest.raises(DamagedCheckpointError, match="have a header of 4611686018427387904"):
        store.verify()


@pytest.mark.parametrize("boxes", [20_000])
def test_a_header_with_countless_boxes_is_refused_before_they_are_compared(boxes):
    header, data_bytes = _header()
    ours = json.loads(header["__metadata__"]["trainwright"])
    ours["tensors"]["w"]["spec"]["boxes"] = [[[0, 0], [0, 0]]] * boxes
    header["__metadata__"]["trainwright"] = json.dumps(ours)
    with pytest.raises(DamagedCheckpointError, match="has 20000 boxes"):
        parse_header(json.dumps(header), data_bytes, HERE)


def test_a_folder_with_a_checkpoints_name_and_other_contents_is_not_one():
    files, store, _ = _saved()
    files.make_folder(ROOT / "step-00000009-0123abcd")
    files.make_folder(ROOT / "step-00000010")
    files.make_folder(ROOT / ".saving-step-00000011-0123abcd-r")
    assert store.steps() == [1, 2]
    assert len(store.leftovers()) == 2


@pytest.mark.parametrize("value", ['"one"', "1", "null", "[" * 900 + "]" * 900])
def test_a_forged_plain_value_raises_the_packages_error_before_a_tensor_is_written(value):
    files, store, folder = _saved()
    manifest = bytes(files._file(folder / "manifest.json").data)
    body = manifest[len('{"crc32":"00000000","body":') : -2]
    body = body.replace(b'"step":2}', b'"step":{"__float__":%s}}' % value.encode())
    files._file(folder / "manifest.json").data[:] = b'{"crc32":"%08x","body":%s}\n' % (
        zlib.crc32(body),
        body,
    )
    target = {"w": torch.zeros(20), "b": torch.tensor(0), "step": 0}

    with pytest.raises((DamagedCheckpointError, NoCheckpointError)):
        store.load(target, 2)
    assert target["w"].count_nonzero() == 0


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e400"])
def test_a_number_that_is_not_finite_is_not_read_as_json_does_not_have_it(number):
    body = MANIFEST.encode()[len('{"crc32":"00000000","body":') : -2]
    body = body.replace(b'{"a":1}', b'{"a":%s}' % number)
    with pytest.raises(DamagedCheckpointError, match="is not finite"):
        decode_manifest(b'{"crc32":"%08x","body":%s}\n' % (zlib.crc32(body), body), HERE)


def test_an_index_that_claims_more_elements_than_there_are_takes_no_memory_for_them():
    files, _, folder = _saved()
    path = folder / "index-00000.json"
    data = bytes(files._file(path).data).replace(b"[20]", b"[%d]" % 2**40)
    body = data[len('{"crc32":"00000000","body":') : -2]
    data = b'{"crc32":"%08x","body":%s}\n' % (zlib.crc32(body), body)
    files._file(path).data = bytearray(data)
    known = (IndexRecord(len(data), zlib.crc32(body)),)
    manifest = attrs.evolve(read_manifest(files, folder), index=known)
    opened = Checkpoint(files, Saved(folder, manifest))
    assert opened.tensors["w"].shape == (2**40,)
    with pytest.raises(DamagedCheckpointError, match="only 20 of this rank's 1099511627776"):
        opened.read("w")


def test_every_error_of_the_package_is_a_checkpointing_error():
    assert issubclass(DamagedCheckpointError, CheckpointingError)
    assert issubclass(NoCheckpointError, LookupError)
