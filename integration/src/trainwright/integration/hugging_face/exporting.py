"""A model written as a folder that Hugging Face's libraries open, from any layout."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from trainwright.checkpointing.errors import SaveFailedError, TreeError
from trainwright.checkpointing.exchange import LazyTensor, WrittenFolder, write_huggingface
from trainwright.checkpointing.exchange.lazy import Piece as Stored
from trainwright.checkpointing.state.files import LocalFiles
from trainwright.checkpointing.state.ranks import Ranks, attempt
from trainwright.collectives import Box, Communicator, ShardSpec
from trainwright.integration.chunks import Chunks
from trainwright.integration.hugging_face.config import CONFIG, write_config
from trainwright.integration.hugging_face.families import FAMILIES
from trainwright.integration.hugging_face.loading import parameter_shapes, saved_buffers
from trainwright.integration.hugging_face.names import EMBEDDING, HEAD, Place
from trainwright.integration.hugging_face.patient_files import PatientFiles
from trainwright.integration.model import ModelShape
from trainwright.sharding import Mesh

TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""What is copied along from the folder of a tokenizer, where it is there."""


def export(
    model: Chunks,
    shape: ModelShape,
    mesh: Mesh,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5_000_000_000,
    like: Mapping[str, Any] | None = None,
    tokenizer: str | Path | None = None,
) -> WrittenFolder:
    """Write config.json and the weights as a new folder, which ``transformers`` opens.

    Rank 0 writes; the others send it their parts block by block, of 16 MiB at most, so that no rank
    ever holds more of the model than it does in training. The folder is written aside, synced, and
    renamed.

    Args:
        model: this rank's stages; every rank calls it with its own.
        shape: of the model.
        mesh: all ranks.
        folder: where; nothing may be there.
        dtype: of the weights in the files; None: that of the master weights.
        max_file_bytes: Tensor bytes a file; a larger tensor has a file of its own.
        like: the config.json that the model came from, for what changes no computation.
        tokenizer: a folder whose files of a tokenizer are copied along.

    Returns:
        What was written, on every rank.

    Raises:
        ConfigError: No family of theirs has such a model. Before any communication.
        CheckpointingError: The folder is there already or cannot be written; on every rank, and
            nothing stays.

    Communicates: for each block one reduction of its bytes to rank 0; a few agreements.
    """
    dtype = dtype or _master_dtype(model)
    values = write_config(shape, dtype, like=like)
    naming = FAMILIES[values["model_type"]].naming
    places = naming.places(parameter_shapes(shape))
    ranks, doing = Ranks(mesh.world), f"{folder} was not written"
    extra = ranks.agreed(lambda: _extra_files(Path(folder), tokenizer), doing, SaveFailedError)
    extra[CONFIG] = json.dumps(dict(sorted(values.items())), indent=2).encode() + b"\n"
    sender = _Sender(_owned(model, mesh, places), mesh.world)
    weights = {
        name: sender.tensor(name, parts, dtype, str(folder))
        for name, parts in _by_file(places).items()
    }
    tied = {HEAD: naming.rename(EMBEDDING)} if shape.tied else {}
    files = PatientFiles(LocalFiles() if mesh.world.rank == 0 else None)
    written, error = attempt(
        lambda: write_huggingface(
            folder, weights, max_file_bytes=max_file_bytes, tied=tied, extra=extra, files=files
        )
    )
    ranks.agree(error, doing, SaveFailedError)
    assert written is not None, "without an error there is a folder"
    return written


@attrs.frozen(eq=False)
class _Held:
    """What this rank sends of a tensor: it, or another that has the same, sends each element."""

    spec: ShardSpec
    local: torch.Tensor


Parts = list[tuple[str, tuple[int, ...], Place]]
"""Of a tensor in a file: our tensors, their whole shapes, and the blocks that they have in common.
"""


class _Sender:
    def __init__(self, held: Mapping[str, _Held], world: Communicator) -> None:
        self._held = held
        self._world = world

    def tensor(self, name: str, parts: Parts, dtype: torch.dtype, source: str) -> LazyTensor:
        """Return a tensor of a file, whose elements come from all ranks when they are written."""
        shape = parts[0][2].shape

        def copy(box: Box, target: torch.Tensor) -> None:
            target.copy_(self._gather(box, parts, dtype))

        return LazyTensor(name, dtype, shape, (Stored(Box.full(shape), copy),), source)

    def _gather(self, box: Box, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """Return a block of a file on rank 0; each element is of one rank, zero on the others."""
        # As whole numbers, which add without rounding and keep the sign of zero.
        size = box.numel * dtype.itemsize
        words = torch.zeros(-(-size // 4), dtype=torch.int32)
        values = words.view(torch.uint8)[:size].view(dtype).view(box.shape)
        for name, shape, place in parts:
            shared = place.box.intersect(box)
            held = self._held.get(name)
            if shared is not None and held is not None:
                block = _own_part(held, shape, place.here(shared), dtype)
                block = block.flatten(0, len(shape) - len(place.shape))
                block = block.t() if place.transposed else block
                values[tuple(slice(*ends) for ends in _within(shared, box))] = block
        words = words.to(self._world.device)
        self._world.reduce(words, 0).wait()
        return words.cpu().view(torch.uint8)[:size].view(dtype).view(box.shape)


def _own_part(held: _Held, shape: tuple[int, ...], ours: Box, dtype: torch.dtype) -> torch.Tensor:
    """Return a block of one of our tensors, zero where this rank has none of it."""
    wanted = ShardSpec.of_boxes(held.spec.name, shape, [ours])
    flat = torch.zeros(ours.numel, dtype=dtype)
    for mine, theirs in held.spec.overlap(wanted):
        flat[theirs] = held.local[mine].to(flat.device, dtype)
    return flat.view(ours.shape)


def _owned(model: Chunks, mesh: Mesh, known: Collection[str]) -> dict[str, _Held]:
    """Return what this rank sends: the replicas with coordinate 0 do, the others nothing."""
    held: dict[str, _Held] = {}
    for name, piece in model.pieces.items():
        if all(mesh.coordinate(axis) == 0 for axis in piece.spec.replicated):
            held[name] = _Held(piece.spec, piece.parameter.detach().view(-1))
    if all(mesh.coordinate(axis) == 0 for axis in ("dp", "cp", "tp")):
        for name, buffer in saved_buffers(model, known):
            held[name] = _Held(ShardSpec.full(name, buffer.shape), buffer.detach().view(-1))
    return held


def _by_file(places: Mapping[str, tuple[Place, ...]]) -> dict[str, Parts]:
    """Return the tensors of the files, each with what it is made of."""
    found: dict[str, Parts] = {}
    for name, each in places.items():
        shape = tuple(max(corners) for corners in zip(*(p.ours.stop for p in each), strict=True))
        for place in each:
            found.setdefault(place.name, []).append((name, shape, place))
    return found


def _within(box: Box, outer: Box) -> list[tuple[int, int]]:
    return [
        (start - at, stop - at)
        for start, stop, at in zip(box.start, box.stop, outer.start, strict=True)
    ]


def _master_dtype(model: Chunks) -> torch.dtype:
    return next(iter(model.pieces.values())).parameter.dtype


def _extra_files(folder: Path, tokenizer: str | Path | None) -> dict[str, bytes]:
    if folder.exists():
        raise TreeError(f"{folder} is there already; give the name of a new folder")
    if tokenizer is None:
        return {}
    found = {name: Path(tokenizer) / name for name in TOKENIZER_FILES}
    return {name: path.read_bytes() for name, path in found.items() if path.is_file()}
