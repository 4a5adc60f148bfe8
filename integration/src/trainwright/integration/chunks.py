"""The chunks of the model that a rank holds, each data parallel on its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import attrs
import torch
from torch import nn

from trainwright.integration.model import DecoderStage
from trainwright.sharding.data import DataParallel, GroupLayout, Piece
from trainwright.sharding.offload import FileStore, Offload


@attrs.frozen(eq=False)
class AtTheEnd:
    """Reduces gradients only once the last backward is over, by not announcing it."""

    parallel: DataParallel

    def last_backward(self) -> None:
        """Start nothing yet."""

    def reduce(self) -> None:
        """Start the reductions."""
        self.parallel.reduce()


def at_the_end(parallel: Mapping[int, DataParallel]) -> dict[int, AtTheEnd]:
    """Return what reduces the chunks' gradients at the end; one for those that share a weight."""
    each = {id(one): AtTheEnd(one) for one in parallel.values()}
    return {number: each[id(one)] for number, one in parallel.items()}


@attrs.frozen(eq=False)
class Chunks:
    """This rank's stages of the pipeline and what shares out their states, as one model.

    Every data rank calls the same methods in the same order, so that the reductions and gathers of
    the chunks follow each other alike.

    Args:
        stages: This rank's stages by their number in the pipeline.
        parallel: What shares out the states of each; one for several where they share a weight.
        offload: Keeps their states away from the device; None: they are on it.
    """

    stages: Mapping[int, DecoderStage]
    parallel: Mapping[int, DataParallel]
    offload: Offload | None = None

    @property
    def pieces(self) -> dict[str, Piece]:
        """This rank's part of each parameter, by the plain model's names."""
        return {name: piece for each in self._each() for name, piece in each.pieces.items()}

    @property
    def layout(self) -> tuple[GroupLayout, ...]:
        """Where each parameter lies in the flat buffers."""
        return tuple(group for each in self._each() for group in each.layout)

    def is_in_file(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor takes no memory because its elements are in a file."""
        store = None if self.offload is None else self.offload.states
        return isinstance(store, FileStore) and store.holds(tensor)

    def zero_grad(self) -> None:
        """Begin a step: forget all gradients."""
        for each in self._each():
            each.zero_grad()

    def wait(self) -> None:
        """Finish the reductions and set the ``grad`` of every piece."""
        for each in self._each():
            each.wait()

    def publish(self) -> None:
        """Make the weights of the modules equal to the pieces."""
        for each in self._each():
            each.publish()

    def gather(self) -> None:
        """Make the weights of all chunks whole."""
        for each in self._each():
            each.gather()
        for each in self._each():
            each.await_weights()

    def release(self) -> None:
        """Give gathered weights back."""
        for each in self._each():
            each.release()

    def _each(self) -> Iterator[DataParallel]:
        known: set[int] = set()
        for each in self.parallel.values():
            if id(each) not in known:
                known.add(id(each))
                yield each


def join(stages: Iterable[DecoderStage]) -> nn.Module:
    """Return a module that holds the parameters of several stages under the plain model's names.

    It is never called: it says which parameters belong together.
    """
    layers = nn.ModuleDict()
    model = nn.ModuleDict({"layers": layers})
    for stage in stages:
        for name, module in stage.model.items():
            if isinstance(module, nn.ModuleDict):
                layers.update(dict(module.items()))
            else:
                model[name] = module
    whole = nn.Module()
    whole.model = model
    return whole


def tie(first: DecoderStage, last: DecoderStage) -> None:
    """Let two stages of one rank have one embedding, not a copy each."""
    last.model["embed_tokens"] = first.model["embed_tokens"]
