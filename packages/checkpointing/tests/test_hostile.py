"""Folders made by an enemy raise this package's errors, run nothing and take little memory."""

import io
import json
import os
import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path

import attrs
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from trainwright.checkpointing.errors import (
    CheckpointingError,
    DamagedCheckpointError,
    NotAvailableYetError,
    UntrustedError,
)
from trainwright.checkpointing.exchange import (
    open_dcp,
    open_huggingface,
    write_dcp,
    write_huggingface,
)
from trainwright.checkpointing.exchange.archive import Archive
from trainwright.checkpointing.exchange.objects import read_object
from trainwright.checkpointing.exchange.pickles import read_pickle
from trainwright.checkpointing.testing.files import CrashingFiles

PLACE = Path("/imports/a")
TENSORS = {"w": torch.arange(6.0).view(2, 3), "b": torch.tensor(3)}


def read_all(opened):
    with opened as source:
        tensors = {name: tensor.read() for name, tensor in source.tensors.items()}
        return tensors, {name: entry.read() for name, entry in source.objects.items()}


class Evil:
    def __init__(self, function, *arguments):
        self.told = function, arguments

    def __reduce__(self):
        return self.told


def wrapped(value):
    return Metadata({"x": BytesStorageMetadata()}, value, {})


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Evil(os.mkdir, "{}/evil"), "mkdir"),
        (Evil(eval, "__import__('os').mkdir('{}/evil')"), "eval"),
        (Evil(getattr, Metadata, "__init__"), "getattr"),
        (Evil(getattr, "text", "upper"), "getattr"),
        (Evil(torch.load, "{}/evil"), "torch.serialization.load"),
        (Path, "pathlib.Path"),
    ],
)
def test_whatever_a_metadata_file_wants_to_call_is_named_and_not_called(
    tmp_path, value, name, protocol
):
    if isinstance(value, Evil):
        function, arguments = value.told
        filled = [a.format(tmp_path) if isinstance(a, str) else a for a in arguments]
        value = Evil(function, *filled)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(wrapped(value), protocol))
    with pytest.raises(UntrustedError, match=f"metadata asks for .*{name}.*refused"):
        open_dcp(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".metadata"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_an_object_with_a_call_in_it_is_refused_when_it_is_read(tmp_path):
    folder = tmp_path / "c"
    evil = Evil(os.mkdir, f"{tmp_path}/evil")
    dcp.save({"x": [evil], "w": TENSORS["w"]}, checkpoint_id=folder, no_dist=True)
    with open_dcp(folder) as source:
        with pytest.raises(UntrustedError, match="mkdir"):
            source.objects["x"].read()
        assert torch.equal(source.tensors["w"].read(), TENSORS["w"])
    assert not (tmp_path / "evil").exists()


HUGE = struct.pack("<Q", 2**62)
# Pairs of pairs of pairs …: nothing as memory, 2**200 leaves to whoever walks over it.
DOUBLING = b"\x80\x04)" + b"".join(b"\x940h%ch%c\x86" % (n, n) for n in range(200))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        b"\x80\x09.",
        b"\x80\x04" + b"\x8e" + HUGE,  # bytes of 2**62
        b"\x80\x05" + b"\x96" + HUGE,  # a bytearray of 2**62
        b"\x80\x04" + b"\x8d" + HUGE,  # a text of 2**62
        b"\x80\x04" + b"\x95" + HUGE + b"N",  # cut short
        b"\x80\x04Nr\xff\xff\xff\xff",  # memo place 2**32
        b"\x80\x04j\xff\xff\xff\xff.",
        b"\x80\x04\x8b\xff\xff\xff\x7f",  # an integer of 2**31 bytes
        b"\x80\x04\x8a\xff" + b"\x7f" * 255 + b".",
        b"I" + b"9" * 5000 + b"\n.",  # protocol 0
        b"\x80\x04" + b"(" * 10_000,
        b"\x80\x04" + b"]" * 10_000 + b"a" * 9_999 + b".",
        b"\x80\x04]\x94h\x00a.",  # a list that holds itself
        DOUBLING + b".",
        b"\x80\x04}" + DOUBLING[2:] + b"Ns.",  # as a key: its hash takes for ever
        b"\x80\x04\x8f(" + DOUBLING[2:] + b"\x90.",
        b"\x80\x04cos\nsystem\nX\x04\x00\x00\x00true\x85R.",
        b"\x80\x04(ios\nsystem\n.",  # INST
        b"\x80\x04\x82\x01.",  # EXT1
        b"\x80\x04ccollections\nOrderedDict\n)R}X\x01\x00\x00\x00aNsb.",
        b"\x80\x04NN\x86R.",
        b"\x80\x04c_codecs\nencode\n)\x85R.",  # to encode a tuple
        b"\x80\x04K\x01Q.",
        b"\x80\x04a.",
        b"\x80\x04u.",
        b"\x80\x04\x93.",
        b"\x80\x04c\xff\n\xff\n.",
        b"\x80\x02ctorch\nSize\n(J\xff\xff\xff\xfft\x85R.",
    ],
)
def test_a_pickle_of_tricks_is_refused_quickly_and_in_little_memory(data):
    files = folder_of({".metadata": data})
    tracemalloc.start()
    try:
        with pytest.raises((UntrustedError, DamagedCheckpointError)):
            open_dcp(PLACE, files=files)
        assert tracemalloc.get_traced_memory()[1] < 100_000 + 300 * len(data)
    finally:
        tracemalloc.stop()


@settings(max_examples=15)
@given(data=st.binary(max_size=40))
def test_any_bytes_are_a_pickle_of_plain_values_or_an_error(data):
    try:
        read_pickle(b"\x80\x04" + data, {}, "x")
    except (UntrustedError, DamagedCheckpointError):
        return


def folder_of(contents):
    files = CrashingFiles()
    files.make_folder(PLACE)
    for name, data in contents.items():
        writer = files.create(PLACE / name)
        writer.write(data)
    return files


def dcp_folder(change=None):
    """Return a small folder whose metadata was changed before it was pickled."""
    files = CrashingFiles()
    write_dcp(PLACE, {**TENSORS, "n": [1, "a"]}, files=files)
    if change is not None:
        data = files._file(PLACE / ".metadata").data
        metadata = pickle.loads(bytes(data))
        change(metadata)
        data[:] = pickle.dumps(metadata)
    return files


def place(metadata, name):
    key = next(key for key in metadata.storage_data if key.fqn == name)
    return key, metadata.storage_data[key]


def to_file(name):
    def change(metadata):
        key, told = place(metadata, "w")
        metadata.storage_data[key] = _StorageInfo(name, told.offset, told.length)

    return change


def to_span(offset, length):
    def change(metadata):
        key, told = place(metadata, "w")
        begin = told.offset if offset is None else offset
        metadata.storage_data[key] = _StorageInfo(told.relative_path, begin, length)

    return change


def to_shape(*shape):
    def change(metadata):
        chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
        entry = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), [chunk])
        metadata.state_dict_metadata["w"] = entry

    return change


def to_many(metadata):
    for number in range(3):
        metadata.state_dict_metadata[f"w{number}"] = metadata.state_dict_metadata["w"]
        index = MetadataIndex(f"w{number}", [0, 0])
        metadata.storage_data[index] = place(metadata, "w")[1]


def to_hole(metadata):
    metadata.state_dict_metadata["w"].size = torch.Size([3, 3])


def to_overlap_and_hole(metadata):
    pieces = [((0, 0), (2, 2)), ((0, 1), (1, 2))]  # six elements in all, but (1, 2) is in none
    metadata.state_dict_metadata["w"].chunks = [
        ChunkStorageMetadata(torch.Size(start), torch.Size(sizes)) for start, sizes in pieces
    ]
    del metadata.state_dict_metadata["b"]
    metadata.storage_data[MetadataIndex("w", [0, 1])] = metadata.storage_data.pop(
        place(metadata, "b")[0]
    )


def to_other_dtype(metadata):
    metadata.state_dict_metadata["w"].properties.dtype = torch.int32


def to_other_version(metadata):
    metadata.version = "2.0"


def to_no_place(metadata):
    del metadata.storage_data[place(metadata, "w")[0]]


def to_transform(metadata):
    place(metadata, "w")[1].transform_descriptors = ["zstd"]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (to_file("../x"), UntrustedError, "may lie outside"),
        (to_file("/etc/passwd"), UntrustedError, "may lie outside"),
        (to_file(".."), UntrustedError, "may lie outside"),
        (to_file("a\0b"), UntrustedError, "may lie outside"),
        (to_file(7), DamagedCheckpointError, "7 where a name"),
        (to_file("absent"), DamagedCheckpointError, "absent is missing"),
        (to_span(-1, 10), DamagedCheckpointError, "a position of -1"),
        (to_span(2**70, 10), DamagedCheckpointError, "a huge integer"),
        (to_span(10**9, 2**60), DamagedCheckpointError, "expected at least"),
        (to_span(None, 8), DamagedCheckpointError, "8 bytes for 6 elements"),
        (to_shape(2**40, 2**40), DamagedCheckpointError, "too many elements"),
        (to_shape(2**30, 2**20), DamagedCheckpointError, "bytes for"),
        (to_many, DamagedCheckpointError, "share bytes"),
        (to_hole, DamagedCheckpointError, "of 9 wanted elements"),
        (to_overlap_and_hole, DamagedCheckpointError, "are there twice"),
        (to_other_dtype, DamagedCheckpointError, "expected .*int32"),
        (to_other_version, NotAvailableYetError, "version '2.0'"),
        (to_no_place, DamagedCheckpointError, "no place for 'w'"),
        (to_transform, NotAvailableYetError, "extensions 'zstd'"),
    ],
)
def test_a_dcp_folder_that_contradicts_itself_is_refused_before_memory_is_taken(
    change, error, message
):
    files = dcp_folder(change)
    tracemalloc.start()
    try:
        with pytest.raises(error, match=message):
            read_all(open_dcp(PLACE, files=files))
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_a_piece_of_one_element_does_not_stand_for_many(tmp_path):
    spread = torch.ones(1).expand(10**4)
    data = pickle_of(spread)
    files = dcp_folder(to_shape(10**4))
    content = files._file(PLACE / "__0_0.distcp").data
    metadata = pickle.loads(bytes(files._file(PLACE / ".metadata").data))
    key, _ = place(metadata, "w")
    metadata.state_dict_metadata["w"].chunks[0].offsets = torch.Size([0])
    del metadata.storage_data[key]
    data += bytes(4 * 10**4)  # long enough for what it claims
    metadata.storage_data[MetadataIndex("w", [0])] = _StorageInfo(
        "__0_0.distcp", len(content), len(data)
    )
    content += data
    files._file(PLACE / ".metadata").data[:] = pickle.dumps(metadata)
    with pytest.raises(DamagedCheckpointError, match="a storage of 4 bytes for"):
        read_all(open_dcp(PLACE, files=files))


def pickle_of(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def damaged_forms(data, stride):
    for at in range(len(data)):
        yield data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]
    for at in range(0, len(data), stride):
        yield data[:at]


def test_no_flipped_bit_or_cut_of_a_metadata_file_is_an_error_of_another_kind():
    files = dcp_folder()
    file = files._file(PLACE / ".metadata")
    whole = bytes(file.data)
    refused = 0
    for data in damaged_forms(whole, 64):
        file.data[:] = data
        try:
            read_all(open_dcp(PLACE, files=files))
        except CheckpointingError:
            refused += 1
    assert refused > len(whole) // 2


def test_no_flipped_bit_or_cut_of_a_piece_gives_other_elements_or_an_error_of_another_kind():
    value = [torch.arange(6.0), {"a": (1, "b")}]
    whole = pickle_of(value)
    refused = 0
    for data in damaged_forms(whole, 64):
        try:
            found = read_object(Archive(InMemory(data), 0, len(data), "x"))
        except CheckpointingError:
            refused += 1
            continue
        assert found[1] == value[1]
        assert torch.equal(found[0], value[0])
    assert refused > len(whole) // 4


def zipped(data_pkl, compress=zipfile.ZIP_STORED, **records):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compress) as archive:
        archive.writestr("archive/data.pkl", data_pkl)
        for name, data in records.items():
            archive.writestr(f"archive/data/{name}", data)
    return stream.getvalue()


def saved_tensor(numel, offset=0, shape=(), stride=(), key="x"):
    """Return the instructions that make a tensor of a storage, as torch.save writes them."""
    whole = [offset, *shape, *stride]
    numbers = [b"\x8a\x09" + n.to_bytes(9, "little", signed=True) for n in whole]
    sizes = b"(" + b"".join(numbers[1 : 1 + len(shape)]) + b"t"
    strides = b"(" + b"".join(numbers[1 + len(shape) :]) + b"t"
    text = b"".join(b"X" + struct.pack("<I", len(t)) + t for t in (key.encode(), b"cpu"))
    count = b"\x8a\x09" + numel.to_bytes(9, "little", signed=True)
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\n" + text + count + b"tQ"
    made = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + numbers[0] + sizes + strides
    return made + b"\x89ccollections\nOrderedDict\n)RtR"


FOUR = bytes(16)  # a storage of four elements


@pytest.mark.parametrize(
    "data",
    [
        zipped(DOUBLING + b"."),
        zipped(b"\x80\x04]\x94h\x00a."),
        zipped(b"\x80\x04" + b"]" * 999 + b"a" * 998 + b"."),
        zipped(b"\x80\x02" + b"N" * 10**6 + b".", zipfile.ZIP_DEFLATED),
        zipped(b"\x80\x02" + saved_tensor(4, 0, (4,), (1,)) + b"."),  # no such storage
        zipped(b"\x80\x02" + saved_tensor(4, 0, (4,), (1,)) + b".", x=FOUR[1:]),
        zipped(b"\x80\x02" + saved_tensor(4, 1, (4,), (1,)) + b".", x=FOUR),
        zipped(b"\x80\x02" + saved_tensor(4, -1, (1,), (1,)) + b".", x=FOUR),
        zipped(b"\x80\x02" + saved_tensor(4, 0, (2,), (-1,)) + b".", x=FOUR),
        zipped(b"\x80\x02" + saved_tensor(4, 0, (2,), (4,)) + b".", x=FOUR),
        zipped(b"\x80\x02" + saved_tensor(4, 0, (2**40,), (0,)) + b".", x=FOUR),
        zipped(b"\x80\x02" + saved_tensor(4, 0, (2**40, 2**40, 0), (1, 1, 1)) + b".", x=FOUR),
        zipped(b"\x80\x02" + saved_tensor(2**60, 0, (2**60,), (1,)) + b".", x=FOUR),
        zipped(b"\x80\x02" + saved_tensor(4, 0, (2,), ()) + b".", x=FOUR),
        zipped(b"\x80\x02(" + saved_tensor(9999, 0, (9999,), (1,)) * 99 + b"t.", x=bytes(39996)),
        zipped(b"\x80\x02(X\x01\0\0\0atQ."),
        zipped(b"\x80\x02NQ."),
        zipped(b"\x80\x02N.", x=FOUR)[:-22] + b"PK\5\6" + b"\xff" * 18,
        zipped(b"\x80\x02N.").replace(b"archive/data.pkl", b"archive/other.zz"),
        b"PK\5\6" + b"\0" * 18,
    ],
)
def test_a_record_of_tricks_is_refused_quickly_and_in_little_memory(data):
    tracemalloc.start()
    try:
        with pytest.raises((UntrustedError, DamagedCheckpointError)):
            read_object(Archive(InMemory(data), 0, len(data), "x"))
        assert tracemalloc.get_traced_memory()[1] < 200_000 + 300 * len(data)
    finally:
        tracemalloc.stop()


def test_the_tricks_are_near_to_what_is_read():
    whole = zipped(b"\x80\x02" + saved_tensor(4, 1, (3,), (1,)) + b".", x=FOUR)
    assert read_object(Archive(InMemory(whole), 0, len(whole), "x")).tolist() == [0, 0, 0]


@attrs.frozen
class InMemory:
    data: bytes

    @property
    def size(self):
        return len(self.data)

    def read_into(self, offset, buffer):
        part = self.data[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        return len(part)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model-00001-of-00002"])
def test_no_flipped_bit_or_cut_of_a_safetensors_folder_is_an_error_of_another_kind(name):
    files = CrashingFiles()
    write_huggingface(PLACE, TENSORS, max_file_bytes=24, files=files)
    (path,) = [path for path in files.paths() if path.name.startswith(name)]
    file = files._file(path)
    refused = 0
    for data in damaged_forms(bytes(file.data), 1):
        file.data[:] = data
        try:
            read_all(open_huggingface(PLACE, files=files))
        except CheckpointingError:
            refused += 1
    assert refused > len(data)


def safetensors(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    return struct.pack("<Q", size % 2**64) + text + data


FAR_AWAY = {"DCP_SHARDING_INFO": '{"a":{"saved_offsets":[4611686018427387904]}}'}


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        safetensors({}, length=2**63),
        safetensors({}, length=-1),
        safetensors({}, length=99),
        safetensors(b"[]"),
        safetensors(b"{" * 50_000),
        safetensors(b"[" * 50_000),
        safetensors(b'{"a":' * 900 + b"1" + b"}" * 900),
        safetensors(b"\xff\xfe"),
        safetensors({"a": entry([2], 0, 8)}, b"\0" * 7),  # too short
        safetensors({"a": entry([2], 0, 8)}, b"\0" * 9),  # too long
        safetensors({"a": entry([1], 0, 4), "b": entry([1], 2, 6)}, b"\0" * 6),  # shared
        safetensors({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, b"\0" * 4),
        safetensors({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, b"\0" * 12),  # a gap
        safetensors({"a": entry([1], -4, 0)}),
        safetensors({"a": entry([-1], 0, 4)}, b"\0" * 4),
        safetensors({"a": entry([2**40, 2**40], 0, 4)}, b"\0" * 4),
        safetensors({"a": entry([2**40, 2**40, 0], 0, 0)}),
        safetensors({"a": entry([2**70], 0, 2**72)}),
        safetensors({"a": entry([1.0], 0, 4)}, b"\0" * 4),
        safetensors({"a": entry([True], 0, 4)}, b"\0" * 4),
        safetensors({"a": entry("1", 0, 4)}, b"\0" * 4),
        safetensors({"a": entry([1] * 65, 0, 4)}, b"\0" * 4),
        safetensors({"a": entry([[[[]]]], 0, 4)}, b"\0" * 4),
        safetensors({"a": entry([1], 0, 4, "F64")}, b"\0" * 4),
        safetensors({"a": entry([1], 0, 4, "PICKLE")}, b"\0" * 4),
        safetensors({"a": entry([1], 0, 4, ["F32"])}, b"\0" * 4),
        safetensors({"a": {"dtype": "F32"}}),
        safetensors({"a": 7}),
        safetensors({"__metadata__": {"x": 1}}),
        safetensors({"__metadata__": []}),
        safetensors(b'{"a":%b,"a":%b}' % ((json.dumps(entry([1], 0, 4)).encode(),) * 2), b"\0" * 4),
        safetensors({"a": entry([1], 0, 4), "__metadata__": {"DCP_SHARDING_INFO": "["}}, b"1234"),
        safetensors(
            {
                "a": entry([1], 0, 4),
                "__metadata__": {
                    "DCP_SHARDING_INFO": '{"a":{"saved_offsets":[4611686018427387904]}}'
                },
            },
            b"1234",
        ),
    ],
)
def test_a_safetensors_file_of_lies_is_refused_in_little_memory(content):
    files = folder_of({"model.safetensors": content})
    tracemalloc.start()
    try:
        with pytest.raises((DamagedCheckpointError, NotAvailableYetError)):
            read_all(open_huggingface(PLACE, files=files))
        assert tracemalloc.get_traced_memory()[1] < 200_000 + 100 * len(content)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("places", "error"),
    [
        ({"a": "../model.safetensors"}, UntrustedError),
        ({"a": "/etc/hostname"}, UntrustedError),
        ({"a": "sub/model.safetensors"}, UntrustedError),
        ({"a": ""}, UntrustedError),
        ({"a": "x" * 300}, UntrustedError),
        ({"a": 7}, UntrustedError),
        ({"a": None}, UntrustedError),
        ({"a": ["b"]}, UntrustedError),
        ({"a": "link"}, UntrustedError),
        ({"a": "pipe"}, UntrustedError),
        ({"a": "folder"}, UntrustedError),
        ({"a": "absent"}, DamagedCheckpointError),
        ([], DamagedCheckpointError),
        (None, DamagedCheckpointError),
    ],
)
def test_an_index_leads_to_no_file_but_those_of_its_folder(tmp_path, places, error):
    (tmp_path / "model.safetensors").write_bytes(safetensors({"a": entry([1], 0, 4)}, b"1234"))
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "model.safetensors")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(error):
        open_huggingface(folder)


def test_links_are_followed_where_the_caller_trusts_them(tmp_path):
    (tmp_path / "blob").write_bytes(safetensors({"a": entry([1], 0, 4)}, b"\0\0\x80?"))
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to("../blob")
    with pytest.raises(UntrustedError, match="follow_links=True"):
        open_huggingface(folder)
    with open_huggingface(folder, follow_links=True) as source:
        assert source.tensors["a"].read().tolist() == [1.0]
