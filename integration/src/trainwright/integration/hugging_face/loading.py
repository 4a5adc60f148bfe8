"""Weights of a Hugging Face folder, straight into the pieces of this rank."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import attrs
import torch

from trainwright.checkpointing import MismatchError
from trainwright.checkpointing.activations import keep_all
from trainwright.checkpointing.errors import LoadFailedError
from trainwright.checkpointing.exchange import LazyTensor, Source, open_huggingface
from trainwright.checkpointing.state.ranks import Ranks
from trainwright.collectives import Box, Communicator, ShardSpec
from trainwright.integration.chunks import Chunks
from trainwright.integration.hugging_face.config import read_config
from trainwright.integration.hugging_face.names import HEAD, Naming, Place
from trainwright.integration.model import ModelShape, PlainLayers, build_stage

_SHOWN = 5


@attrs.frozen
class Loaded:
    """What a load has found beside the weights.

    Args:
        ignored: keys of config.json that change nothing here, each with the reason.
        left_out: tensors in the files that the model has not, and need not have.
    """

    ignored: Mapping[str, str]
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        keys = ", ".join(self.ignored) or "none"
        told = f"keys of config.json that change nothing here: {keys}"
        if not self.left_out:
            return told
        more = len(self.left_out) - _SHOWN
        shown = ", ".join(self.left_out[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
        return f"{told}; tensors left out: {shown}"


def load_(
    model: Chunks,
    shape: ModelShape,
    folder: str | Path,
    world: Communicator,
    *,
    ignore: Collection[str] = (),
) -> Loaded:
    """Fill the weights of this rank from the safetensors of a folder, one file or many.

    Only the bytes of this rank's part are read, piece by piece, in whatever layout it is; they are
    converted to the dtype of the master weights. Tied heads are not looked for.

    Args:
        model: this rank's stages; every rank calls it with its own.
        shape: of the model, which must be that of the folder.
        folder: the folder; it may be full of links, as the cache of the hub is.
        world: all ranks of the run.
        ignore: as in `read_config`.

    Returns:
        What was passed over.

    Raises:
        ConfigError: config.json cannot be understood, or says another shape.
        MismatchError: tensors are missing, unexpected or of another shape; all are named.
        CheckpointingError: a file is damaged or not finite, or unreadable. All are raised on every
            rank alike, and nothing has been changed then but for damage found while reading.

    Communicates: three all-reduces of 8 bytes.
    """
    ranks, doing = Ranks(world), f"{folder} was not loaded"
    found = read_config(folder, ignore=ignore)
    places = found.family.naming.places(parameter_shapes(shape))
    source = ranks.agreed(lambda: _open(folder), doing, LoadFailedError)
    with source:
        filler = _Filler(found.family.naming, places, source, shape)
        left_out = ranks.agreed(filler.check, doing, LoadFailedError)
        ranks.agreed(lambda: filler.fill(model), doing, LoadFailedError)
    model.publish()
    return Loaded(found.ignored, left_out)


def parameter_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the whole shapes of all weights of a model, and of the buffers that are saved."""
    with torch.device("meta"):
        stage = build_stage(shape, PlainLayers(), range(shape.layers), keep_all())
    return {name: tuple(tensor.shape) for name, tensor in stage.state_dict().items()}


@attrs.frozen(eq=False)
class _Filler:
    naming: Naming
    places: Mapping[str, tuple[Place, ...]]
    source: Source
    shape: ModelShape

    def check(self) -> tuple[str, ...]:
        """Return the tensors that are left out.

        Raises:
            MismatchError: Tensors are missing, unexpected or of another shape.
        """
        wanted = {place.name: place.shape for each in self.places.values() for place in each}
        found = self._found()
        problems = [f"{name} is missing" for name in wanted if name not in found]
        problems += [
            f"{name} has shape {found[name].shape}, expected {size}"
            for name, size in wanted.items()
            if name in found and found[name].shape != size
        ]
        rest = sorted(set(found) - set(wanted))
        left_out = tuple(name for name in rest if self._is_needless(name))
        problems += [f"{name} is unexpected" for name in rest if name not in left_out]
        problems += [
            f"{name} has the dtype {found[name].dtype}, which holds no weights"
            for name in wanted
            if name in found and not found[name].dtype.is_floating_point
        ]
        if problems:
            more = len(problems) - _SHOWN
            raise MismatchError(
                f"its tensors are not those of the model: {'; '.join(problems[:_SHOWN])}"
                + (f"; and {more} more" if more > 0 else "")
            )
        return left_out

    @torch.no_grad()
    def fill(self, model: Chunks) -> None:
        """Fill the pieces and the buffers of this rank's stages."""
        for piece in model.pieces.values():
            self._fill(piece.parameter.detach(), piece.spec)
        for name, buffer in saved_buffers(model, self.places):
            self._fill(buffer, ShardSpec.full(name, buffer.shape))

    def _fill(self, local: torch.Tensor, spec: ShardSpec) -> None:
        flat = local.view(-1)
        for at, box in spec.parts():
            target = flat[at : at + box.numel].view(box.shape)
            for place in self.places[spec.name]:
                shared = place.ours.intersect(box)
                if shared is not None:
                    inner = tuple(
                        slice(first - start, last - start)
                        for first, last, start in zip(
                            shared.start, shared.stop, box.start, strict=True
                        )
                    )
                    target[inner].copy_(self._read(place, shared))

    def _read(self, place: Place, ours: Box) -> torch.Tensor:
        box = place.there(ours)
        spec = ShardSpec.of_boxes(place.name, place.shape, [box])
        values = self._found()[place.name].read(spec).view(box.shape)
        # Numbers of one byte have no such test of their own.
        seen = values if values.element_size() > 1 else values.float()
        if not torch.isfinite(seen).all():
            raise LoadFailedError(
                f"{place.name} holds values that are not finite: fetch or save the folder again, "
                "or begin with random weights by --from-scratch"
            )
        return (values.t() if place.transposed else values).reshape(ours.shape)

    def _found(self) -> Mapping[str, LazyTensor]:
        return self.source.tensors

    def _is_needless(self, name: str) -> bool:
        if name == HEAD and self.shape.tied:
            return True
        number = name.split(".layers.")[-1].split(".")[0]
        beyond = ".layers." in name and number.isdigit() and int(number) >= self.shape.layers
        return beyond or name.endswith(self.naming.left_out)


def saved_buffers(model: Chunks, known: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of this rank's stages that have one of the known names."""
    for stage in model.stages.values():
        for name, buffer in stage.named_buffers():
            if name in known:
                yield name, buffer


def _open(folder: str | Path) -> Source:
    return open_huggingface(folder, follow_links=True)
