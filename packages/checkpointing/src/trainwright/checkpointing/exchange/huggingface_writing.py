"""Writes folders of safetensors files as Hugging Face's libraries read them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
import torch

from trainwright.checkpointing.errors import CheckpointingError, SaveFailedError, TreeError
from trainwright.checkpointing.protocol import Files, Writer
from trainwright.checkpointing.state.dtypes import to_bytes
from trainwright.checkpointing.state.files import LocalFiles
from trainwright.checkpointing.state.ranks import attempt
from trainwright.collectives.shard_spec import ShardSpec

from .huggingface import INDEX, SINGLE
from .lazy import LazyTensor
from .publishing import Aside
from .safetensors_file import METADATA, plan_safetensors_file

_BLOCK_BYTES = 1 << 24
Weights = Mapping[str, torch.Tensor | LazyTensor]


@attrs.frozen
class WrittenFolder:
    """What was written.

    Args:
        weight_map: The file of each tensor.
        total_size: Bytes of all tensors.
        tied: Names that were left out because another name has the same memory, and that name.
    """

    weight_map: dict[str, str]
    total_size: int
    tied: dict[str, str]


def write_huggingface(
    folder: str | Path,
    weights: Weights,
    *,
    max_file_bytes: int = 5_000_000_000,
    tied: Mapping[str, str] | None = None,
    extra: Mapping[str, bytes] | None = None,
    files: Files | None = None,
) -> WrittenFolder:
    """Write tensors as a new folder of safetensors files.

    One file, ``model.safetensors``, if they fit; else ``model-00001-of-0000N.safetensors`` … in
    the order of ``weights``, and ``model.safetensors.index.json``. It is written aside, synced,
    and renamed. Of tied weights, tensors of one memory, the first name is kept; each file's
    metadata says which names its tensors also stand for.

    Args:
        folder: Where; nothing may be there.
        weights: Tensors by name; a `LazyTensor` is read part by part while it is written.
        max_file_bytes: Tensor bytes a file; a larger tensor has a file of its own.
        tied: Names that are not to be written, and the name in ``weights`` that stands for each.
        extra: Other files of the folder, such as config.json, by name.
        files: The file system.

    Raises:
        TreeError: A tensor cannot be written, or ``folder`` exists. Nothing is written.
        SaveFailedError: The folder could not be written. Nothing stays.
    """
    if type(max_file_bytes) is not int or max_file_bytes < 1:
        raise TreeError(f"max_file_bytes must be at least 1, got {max_file_bytes!r}")
    kept, left_out = _drop_tied(weights, dict(tied or {}))
    plans = _plan_files(kept, left_out, max_file_bytes)
    system = files if files is not None else LocalFiles()
    aside = Aside(system, Path(folder).absolute(), secrets.token_hex(4))
    weight_map = {name: plan.file for plan in plans for name in plan.tensors}
    total = sum(_num_bytes(value) for value in kept.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    try:
        aside.check()
        beside = dict(extra or {})
        if len(plans) > 1:
            beside[INDEX] = json.dumps(index, indent=2).encode() + b"\n"
        _write_all(aside, plans, beside)
    except Exception as error:
        attempt(aside.discard)
        if isinstance(error, CheckpointingError):
            raise
        raise SaveFailedError(f"{folder} was not written: {error!r}") from error
    return WrittenFolder(weight_map, total, left_out)


@attrs.frozen(eq=False)
class _FilePlan:
    file: str
    tensors: dict[str, torch.Tensor | LazyTensor]
    header: bytes
    order: list[str]


def _plan_files(
    weights: Weights, left_out: Mapping[str, str], max_file_bytes: int
) -> list[_FilePlan]:
    groups = _split(weights, max_file_bytes)
    plans: list[_FilePlan] = []
    for number, group in enumerate(groups):
        names = {name: kept for name, kept in left_out.items() if kept in group}
        kinds = {name: (value.dtype, tuple(value.shape)) for name, value in group.items()}
        header, order = plan_safetensors_file(kinds, {**names, "format": "pt"})
        file = SINGLE if len(groups) == 1 else _file_name(number, len(groups))
        plans.append(_FilePlan(file, group, header, order))
    return plans


def _write_all(aside: Aside, plans: list[_FilePlan], beside: Mapping[str, bytes]) -> None:
    aside.make()
    for plan in plans:
        writer = aside.create(plan.file)
        try:
            writer.write(plan.header)
            for name in plan.order:
                _write_tensor(writer, plan.tensors[name])
            writer.sync()
        finally:
            writer.close()
    for name, data in beside.items():
        aside.write(name, data)
    aside.publish()


def _write_tensor(writer: Writer, value: torch.Tensor | LazyTensor) -> None:
    if isinstance(value, torch.Tensor):
        writer.write(to_bytes(value))
        return
    whole = ShardSpec.full(value.name, value.shape)
    step = max(1, _BLOCK_BYTES // value.dtype.itemsize)
    for at in range(0, value.numel, step):
        writer.write(to_bytes(value.read(whole.narrow(at, min(at + step, value.numel)))))


def _split(weights: Weights, max_bytes: int) -> list[dict[str, torch.Tensor | LazyTensor]]:
    groups: list[dict[str, torch.Tensor | LazyTensor]] = [{}]
    held = 0
    for name, value in weights.items():
        size = _num_bytes(value)
        if groups[-1] and held + size > max_bytes:
            groups.append({})
            held = 0
        groups[-1][name] = value
        held += size
    return groups


def _drop_tied(
    weights: Weights, tied: dict[str, str]
) -> tuple[dict[str, torch.Tensor | LazyTensor], dict[str, str]]:
    """Return the tensors to write, and the names left out with those that stand for them."""
    for name, stands_for in tied.items():
        if stands_for not in weights or stands_for in tied:
            raise TreeError(f"{name} is tied to {stands_for}, which is not among the weights")
    kept: dict[str, torch.Tensor | LazyTensor] = {}
    first: dict[object, str] = {}
    left_out: dict[str, str] = dict(tied)
    for name, value in weights.items():
        _check(name, value)
        if name in tied:
            continue
        for place in _places(value):
            if place in first:
                left_out[name] = first[place]
            first.setdefault(place, name)
        if name not in left_out:
            kept[name] = value
    return kept, left_out


def _places(value: torch.Tensor | LazyTensor) -> Iterator[object]:
    """Yield what tensors of one memory have in common; those without memory have nothing."""
    if isinstance(value, LazyTensor):
        yield id(value)
    elif value.numel() > 0:
        at = value.untyped_storage().data_ptr(), value.storage_offset()
        yield (value.device, *at, value.dtype, tuple(value.shape), value.stride(), value.is_conj())


def _check(name: str, value: torch.Tensor | LazyTensor) -> None:
    if type(name) is not str or name == METADATA:
        raise TreeError(f"{name!r} cannot be the name of a tensor in a safetensors file")
    if isinstance(value, LazyTensor):
        return
    if not isinstance(value, torch.Tensor) or hasattr(value, "to_local"):
        raise TreeError(f"{name}: only whole tensors can be written, got {type(value).__name__}")
    if value.layout != torch.strided or value.is_meta or value.is_quantized:
        raise TreeError(f"{name}: only dense tensors with data can be written")


def _num_bytes(value: torch.Tensor | LazyTensor) -> int:
    return value.num_bytes if isinstance(value, LazyTensor) else value.numel() * value.itemsize


def _file_name(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"
