"""Readers of this project's own checkpoints and plans, with sound inputs for them.

Where a file carries a checksum of itself, damage goes beneath it: whoever forges a file also writes
its checksum, and a reader that only ever sees wrong ones is not tried.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.fuzzing import Reader
from trainwright.checkpointing import Sharded, StateStore
from trainwright.checkpointing.activations.parsing import parse_keeper, parse_policy
from trainwright.checkpointing.activations.planning import (
    ChainCosts,
    Compress,
    LayerCost,
    Offload,
    OperatorCost,
    OperatorCosts,
    Partial,
    costs_from_json,
    costs_to_json,
    plan,
    plan_from_json,
    plan_to_json,
)
from trainwright.checkpointing.errors import (
    CheckpointingError,
    DamagedCheckpointError,
    PlanError,
    PolicyError,
)
from trainwright.checkpointing.state.catalog import Saved
from trainwright.checkpointing.state.header import parse_header
from trainwright.checkpointing.state.inspection import examine, list_checkpoints
from trainwright.checkpointing.state.manifest import decode_manifest, read_manifest
from trainwright.checkpointing.state.reading import Checkpoint
from trainwright.checkpointing.state.tensor_file import FileRecord, TensorFile
from trainwright.checkpointing.testing.files import CrashingFiles
from trainwright.collectives import Box, ShardSpec

ROOT = Path("/runs/a")
_PLACE = Path("there")
_FORMAT_1 = (
    b'{"format":"trainwright-checkpoint","version":1,"run":"r","step":3,"sequence":1,'
    b'"files":[[560,1,2],null],"plain":{"step":3}}'
)


def sealed(body: bytes) -> bytes:
    """Return a file of JSON with the checksum of its body, as `seal` makes it."""
    return b'{"crc32":"%08x","body":%s}\n' % (zlib.crc32(body), body)


def body_of(data: bytes) -> bytes:
    """Return the body of such a file."""
    return data[len(b'{"crc32":"00000000","body":') : -2]


def state() -> dict[str, Any]:
    """Return a small state with a value of every kind that a checkpoint can hold."""
    spec = ShardSpec.of_boxes("w", (4, 6), [Box((0, 0), (4, 3)), Box((0, 3), (4, 6))])
    tied = torch.arange(5.0)
    return {
        "w": Sharded(torch.arange(24.0).view(2, 4, 3).reshape(-1), spec),
        "b": torch.tensor(2, dtype=torch.int64),
        "half": [torch.ones(3, dtype=torch.bfloat16), torch.zeros(2, 0)],
        "tied": tied,
        "twin": tied,
        "step": 3,
        "rates": (0.1, float("inf")),
        "by number": {1: "a", 2: torch.float16},
        "counts": [{(1, "a"): None}],
    }


def saved_files() -> tuple[CrashingFiles, Path]:
    """Return files in memory with a checkpoint of `state`, and its folder."""
    files = CrashingFiles()
    folder = StateStore(ROOT, files=files, run="r", block_bytes=32).save(3, state())
    return files, folder


def put(files: CrashingFiles, path: Path, data: bytes) -> None:
    """Replace the contents of a file in memory."""
    files._file(path).data = bytearray(data)


def contents(files: CrashingFiles, path: Path) -> bytes:
    """Return the contents of a file in memory."""
    return bytes(files._file(path).data)


def same_tensors(first: Any, second: Any) -> bool:
    """Whether values with tensors in them are equal bit for bit."""
    if isinstance(first, torch.Tensor):
        return _bits(first) == _bits(second)
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(
            same_tensors(first[k], second[k]) for k in first
        )
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same_tensors, first, second))
    return type(first) is type(second) and (first == second or repr(first) == repr(second))


def _bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), data.numpy().tobytes()


def manifests() -> Reader:
    """Return the reader of a checkpoint's manifest; what it accepts is written and read again."""
    files, folder = saved_files()
    whole = contents(files, folder / "manifest.json")

    def read(data: bytes) -> object:
        file = data if data.startswith(b'{"crc32"') else sealed(data)
        manifest = decode_manifest(file, _PLACE)
        plain = manifest.decode_plain(_PLACE)
        if manifest.files is None:
            assert decode_manifest(manifest.encode(), _PLACE) == manifest
        return manifest, plain

    return Reader(read, [body_of(whole), body_of(whole), _FORMAT_1, whole], (CheckpointingError,))


def headers() -> Reader:
    """Return the reader of the header of a file of tensors, with the JSON within its JSON."""
    files, folder = saved_files()
    data = contents(files, folder / "rank-00000.safetensors")
    length = int.from_bytes(data[:8], "little")
    outer = json.loads(data[8 : 8 + length])
    outer["__metadata__"]["trainwright"] = json.loads(outer["__metadata__"]["trainwright"])
    num_bytes = len(data) - 8 - length

    def read(data: bytes) -> object:
        try:
            value = json.loads(data)
            value["__metadata__"]["trainwright"] = json.dumps(value["__metadata__"]["trainwright"])
            data = json.dumps(value).encode()
        except (ValueError, TypeError, LookupError, RecursionError):
            pass  # as it is, then
        header = parse_header(data, num_bytes, _PLACE)
        assert all(0 <= info.begin <= info.end <= num_bytes for info in header.tensors.values())
        return header

    return Reader(read, [json.dumps(outer).encode()], (CheckpointingError,))


def tensor_files() -> Reader:
    """Return the reader of a file of tensors whose header has the right checksum."""
    files, folder = saved_files()
    path = folder / "rank-00000.safetensors"
    whole = contents(files, path)
    length = int.from_bytes(whole[:8], "little")
    ours = json.loads(json.loads(whole[8 : 8 + length])["__metadata__"]["trainwright"])
    assert ours["block_bytes"] == 32
    begin, end = json.loads(whole[8 : 8 + length])["__crc32__"]["data_offsets"]

    def read(data: bytes) -> object:
        put(files, path, data)
        size = 8 + min(int.from_bytes(data[:8], "little"), len(data))
        table = data[size + begin : size + end]
        opened = TensorFile(
            files, path, FileRecord(len(data), zlib.crc32(data[:size]), zlib.crc32(table))
        )
        opened.verify()
        return opened.tensors

    return Reader(read, [whole], (CheckpointingError,))


def indexes() -> Reader:
    """Return the reader of an index; the tensors that it describes are read."""
    files, folder = saved_files()
    return _whole_checkpoint(files, folder, folder / "index-00000.json", _read_all)


def _read_all(files: CrashingFiles, folder: Path) -> object:
    with Checkpoint(files, Saved(folder, read_manifest(files, folder))) as opened:
        return {name: opened.read(name) for name in opened.tensors}, opened.plain


def loads() -> Reader:
    """Return a load into tensors of a checkpoint with a damaged index."""
    files, folder = saved_files()
    return _whole_checkpoint(files, folder, folder / "index-00000.json", _load)


def _load(files: CrashingFiles, folder: Path) -> object:
    tree = StateStore(ROOT, files=files, run="r").load(_empty(state()))
    return {**tree, "w": tree["w"].tensor}


def _empty(value: Any) -> Any:
    if isinstance(value, Sharded):
        return Sharded(torch.zeros_like(value.tensor), value.spec)
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, list):
        return [_empty(item) for item in value]
    if isinstance(value, dict):
        return {key: _empty(item) for key, item in value.items()}
    return value


def _whole_checkpoint(
    files: CrashingFiles,
    folder: Path,
    index: Path,
    use: Callable[[CrashingFiles, Path], object],
) -> Reader:
    """Return what reads a checkpoint whose index is damaged and whose manifest fits the damage."""
    body = json.loads(body_of(contents(files, folder / "manifest.json")))

    def read(data: bytes) -> object:
        put(files, index, sealed(data))
        body["index"] = [[len(sealed(data)), zlib.crc32(data)]]
        put(files, folder / "manifest.json", sealed(json.dumps(body).encode()))
        return use(files, folder)

    return Reader(read, [body_of(contents(files, index))], (CheckpointingError,), same_tensors)


def folders() -> Reader:
    """Return what looks over a folder of checkpoints, one of which has a damaged manifest."""
    files, folder = saved_files()
    StateStore(ROOT, files=files, run="r", block_bytes=32).save(4, state())
    path = folder / "manifest.json"
    whole = contents(files, path)

    def read(data: bytes) -> object:
        put(files, path, data if data.startswith(b'{"crc32"') else sealed(data))
        store = StateStore(ROOT, files=files, run="r")
        complete, broken = list_checkpoints(ROOT, files=files)
        found = [(saved.folder, saved.manifest.step) for saved in complete]
        assert 4 in store.steps(), "the sound one must be found"
        healths = [(health.folder, health.problems) for health in examine(ROOT, files=files)]
        seen = found, store.steps(), store.runs(), store.leftovers(), store.latest(), healths
        if broken:
            raise DamagedCheckpointError(broken[0][1])
        return seen

    return Reader(read, [body_of(whole), whole, _FORMAT_1], (CheckpointingError,))


def _costs() -> list[ChainCosts | OperatorCosts]:
    choices = [Offload("cpu", 1e9, 2e9), Compress("int8", 0.25, 1e9, 1e9)]
    layer = LayerCost("a", 1.0, 2.0, 64, 128, output_saved=True)
    partial = Partial("half", 32, 0.5)
    part = LayerCost("b", 1.0, 2.0, 64, 128, output_saved=False, partials=[partial])
    operator = OperatorCost("mm", 1.0, 64)
    return [ChainCosts([layer, part], 64, choices), OperatorCosts([operator], choices)]


def plans() -> Reader:
    """Return the reader of plans of what activations to keep."""
    seeds = [plan_to_json(plan(costs, 10**6)).encode() for costs in _costs()]
    nested = b'{"claims":null,"kind":"chain","items":[[0,""],[[[1,""],[[[2,""]],""]],"cpu"]]}'

    def read(data: bytes) -> object:
        made = plan_from_json(data.decode("utf-8", "surrogateescape"))
        assert plan_from_json(plan_to_json(made)) == made
        return made, str(made)

    return Reader(read, [*seeds, nested], (PlanError,))


def costs() -> Reader:
    """Return the reader of measured costs."""
    seeds = [costs_to_json(each).encode() for each in _costs()]

    def read(data: bytes) -> object:
        made = costs_from_json(data.decode("utf-8", "surrogateescape"))
        assert costs_from_json(costs_to_json(made)) == made
        return made

    return Reader(read, seeds, (PlanError,))


def policies() -> Reader:
    """Return the reader of the names of recomputation policies and codecs."""
    names = [b"none", b"full", b"every-4", b"sqrt", b"selective", b"budget:1GiB"]

    def read(data: bytes) -> object:
        text = data.decode("utf-8", "surrogateescape")
        if text in ("int8", "fp8", "bf16", "cpu"):
            return type(parse_keeper("cpu", text if text != "cpu" else None))
        return type(parse_policy(text))

    return Reader(read, [*names, b"int8", b"fp8", b"bf16"], (PolicyError,))


READERS: dict[str, Callable[[], Reader]] = {
    "checkpoint manifest": manifests,
    "checkpoint header": headers,
    "checkpoint tensor file": tensor_files,
    "checkpoint index": indexes,
    "checkpoint load": loads,
    "checkpoint folder": folders,
    "activation plan": plans,
    "activation costs": costs,
    "activation policy": policies,
}
