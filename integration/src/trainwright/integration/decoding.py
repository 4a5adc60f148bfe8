"""The model as it continues sequences, over the ranks of any layout."""

# Shapes: B batch, S sequence, D model, V vocabulary; a shard keeps its letters.

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch
from torch import nn

from trainwright.checkpointing.activations import keep_all
from trainwright.integration.model import DecoderStage, TensorParallelLayers, build_stage
from trainwright.integration.model.cache import KeyValueCache
from trainwright.integration.model.norms import at_least_float32
from trainwright.integration.model_parts import ModelParts
from trainwright.sharding import Mesh


class Decoder:
    """Reads sequences and says what may come next, with the weights of the parts as they stand.

    Its stages are twins of those that train: they have the same parameters, but whole sequences on
    every rank (no positions are cut over tp or cp), experts that take all tokens whatever their
    capacity, no FP8 products, and attention that remembers. Ranks of a pipeline and of tp call it
    together with the same rows; with experts all ranks call it together, each with rows of its own.

    Args:
        parts: Whose weights; they are whole while this is used, see `decoder_of`.
        capacity: Positions of a row at most.

    Communicates: for each call the boundary tensors of what is read, forwards only, and over tp
        what a forward does, and the logits of one position a row.
    """

    def __init__(self, parts: ModelParts, capacity: int) -> None:
        self._pipeline = parts.mesh.communicator("pp")
        self._ranks = parts.executor.schedule.rank_of_stage
        self._device = parts.mesh.world.device
        self._caches: dict[int, KeyValueCache] = {}
        self._stages: dict[int, DecoderStage] = {}
        for number, stage in sorted(parts.model.stages.items()):
            self._caches[number] = KeyValueCache(capacity)
            self._stages[number] = _twin(stage, parts.mesh, self._caches[number])

    def read(self, rows: Sequence[Sequence[int]]) -> torch.Tensor | None:
        """Read whole rows, forgetting others; return logits of what follows each [B, V].

        They come in at least float32 on the ranks of the last stage, elsewhere None.
        """
        longest = max(len(row) for row in rows)
        # Padding stands after the row: nothing of the row sees it.
        padded = [[*row, *[0] * (longest - len(row))] for row in rows]
        return self._forward(padded, [0] * len(rows), [len(row) - 1 for row in rows])

    def advance(self, tokens: Sequence[int], places: Sequence[int]) -> torch.Tensor | None:
        """Read one more token of each row, which stands at its place; return as `read` does."""
        return self._forward([[token] for token in tokens], places, [0] * len(tokens))

    def _forward(
        self, rows: Sequence[Sequence[int]], places: Sequence[int], ends: Sequence[int]
    ) -> torch.Tensor | None:
        tokens_BS = torch.tensor(rows, dtype=torch.int64, device=self._device)
        inputs = {"tokens_BS": tokens_BS, **self._positions(places, tokens_BS.shape[1])}
        hidden_BSD: torch.Tensor | None = None
        for number, stage in self._stages.items():
            if number > 0 and self._ranks[number - 1] != self._pipeline.rank:
                hidden_BSD = _new_hidden(stage, tokens_BS)
                self._pipeline.recv(hidden_BSD, self._ranks[number - 1]).wait()
            self._caches[number].begin(places)
            if stage.is_last:
                _last_norm(stage).ends_B = torch.tensor(ends, device=self._device)
            hidden_BSD = stage(hidden_BSD, **inputs)
            if stage.is_last:
                return _join(stage, hidden_BSD[:, 0])
            if self._ranks[number + 1] != self._pipeline.rank:
                self._pipeline.send(hidden_BSD.contiguous(), self._ranks[number + 1]).wait()
        return None

    def _positions(self, places: Sequence[int], length: int) -> Mapping[str, torch.Tensor]:
        steps_S = torch.arange(length, device=self._device)
        if len(set(places)) == 1:
            return {"positions_S": steps_S + places[0]}
        # Rows that stand at places of their own are documents of their own, with ordinals.
        return {
            "positions_S": steps_S,
            "documents_BS": torch.zeros(len(places), length, dtype=torch.int64),
            "ordinals_BS": torch.tensor(places, device=self._device)[:, None] + steps_S,
        }


@contextlib.contextmanager
def decoder_of(parts: ModelParts, capacity: int) -> Iterator[Decoder]:
    """Keep all weights of this rank's stages whole, and yield what continues sequences with them.

    Communicates: at stage 3 one all-gather of the weights for all of the time.
    """
    parts.model.gather()
    try:
        yield Decoder(parts, capacity)
    finally:
        parts.model.release()


class _EndsOnly(nn.Module):
    """A norm of the one position of each row whose logits are asked for."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.ends_B: torch.Tensor | None = None

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        assert self.ends_B is not None
        rows_B = torch.arange(len(hidden_BSD), device=hidden_BSD.device)
        normed: torch.Tensor = self.norm(hidden_BSD[rows_B, self.ends_B][:, None])
        return normed


def _twin(stage: DecoderStage, mesh: Mesh, cache: KeyValueCache) -> DecoderStage:
    """Return a stage with the same parameters and buffers, which are not copied."""
    shape = stage.shape
    if shape.experts is not None:
        # What else is read at the same time must not decide whether a token is dropped.
        routing = attrs.evolve(shape.experts.routing, capacity_factor=None)
        shape = attrs.evolve(shape, experts=attrs.evolve(shape.experts, routing=routing))
    numbers = [int(number) for number in stage.model.get_submodule("layers")._modules]
    blocks = range(numbers[0], numbers[-1] + 1)
    with torch.device("meta"):
        twin = build_stage(shape, TensorParallelLayers(mesh, None, cache), blocks, keep_all())
    modules = dict(stage.named_modules(remove_duplicate=False))
    for name, module in twin.named_modules(remove_duplicate=False):
        module._parameters.update(modules[name]._parameters)
        module._buffers.update(modules[name]._buffers)
    if twin.is_last:
        twin.model["norm"] = _EndsOnly(twin.model["norm"])
    return twin.eval()


def _last_norm(stage: DecoderStage) -> _EndsOnly:
    norm = stage.model["norm"]
    assert isinstance(norm, _EndsOnly)
    return norm


def _join(stage: DecoderStage, logits_BV: torch.Tensor) -> torch.Tensor:
    # What joins a vocabulary joins the first dim.
    local_VB = at_least_float32(logits_BV).t().contiguous()
    return stage.layers.join_vocabulary(local_VB, stage.shape.vocabulary).t()


def _new_hidden(stage: DecoderStage, tokens_BS: torch.Tensor) -> torch.Tensor:
    matrices = (parameter.dtype for parameter in stage.parameters() if parameter.dim() > 1)
    shape = (*tokens_BS.shape, stage.shape.width)
    return torch.empty(shape, dtype=next(matrices), device=tokens_BS.device)
