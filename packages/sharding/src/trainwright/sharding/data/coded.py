"""Weights that travel as codes: one byte an element, and one number a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch

from trainwright.collectives import Communicator, ReduceOp
from trainwright.sharding.protocol import WeightCodec


@attrs.define(eq=False)
class CodedPart:
    """One parameter's elements of a bucket.

    Args:
        name: Of the parameter.
        codec: How it travels.
        place: Its elements of the whole bucket.
        own: Those of them that this rank keeps, counted from the start of its range.
        measured: What the codec has measured of the whole tensor, agreed by the ranks.
    """

    name: str
    codec: WeightCodec
    place: slice
    own: slice
    measured: torch.Tensor


@attrs.define(eq=False)
class CodedWeights:
    """The codes of a bucket's weights: this rank's, and all of them while they arrive.

    Args:
        parts: The parameters in the bucket.
        codes: Of this rank's range, uint8; padding is zero.
    """

    parts: Sequence[CodedPart]
    codes: torch.Tensor
    _arriving: torch.Tensor | None = None

    def encode(self, kept: torch.Tensor) -> None:
        """Make codes of this rank's range, by what was measured."""
        for part in self.parts:
            if part.own.start < part.own.stop:
                self.codes[part.own] = part.codec.encode(kept[part.own], part.measured)

    def arriving(self, numel: int) -> torch.Tensor:
        """Return memory for all codes."""
        self._arriving = self.codes.new_empty(numel)
        return self._arriving

    def decode_into(self, full: torch.Tensor) -> None:
        """Make weights of the codes that have arrived, and give the memory of these back."""
        assert self._arriving is not None, "codes are decoded once they have arrived"
        full.zero_()
        for part in self.parts:
            codes = self._arriving[part.place]
            full[part.place] = part.codec.decode(codes, part.measured, full.dtype)
        self._arriving = None

    def changed(self, own: torch.Tensor) -> torch.Tensor:
        """Return which elements of this rank's range are no longer what its codes say."""
        found = torch.ones_like(own, dtype=torch.bool)
        for part in self.parts:
            known = part.codec.decode(self.codes[part.own], part.measured, own.dtype)
            found[part.own] = own[part.own] != known
        return found


@attrs.frozen(eq=False)
class CodedGroup:
    """The parameters whose parts lie on the same ranks, and are measured together.

    Args:
        names: Of all of them, the same on every rank, also of those without elements here.
        comms: The ranks that hold parts of one tensor, joined one after the other.
        held: This rank's weights and codes.
    """

    names: tuple[str, ...]
    comms: tuple[Communicator, ...]
    held: Sequence[tuple[torch.Tensor, CodedWeights]]

    def encode(self) -> None:
        """Measure all weights as they are now, and make codes of this rank's ranges.

        Communicates:
            One all-reduce of 4 bytes a parameter for each communicator.
        """
        device = self.comms[0].device
        measured = dict.fromkeys(self.names, torch.zeros((), device=device))
        for kept, coded in self.held:
            for part in coded.parts:
                found = part.codec.measure(kept[part.own])
                measured[part.name] = found.to(device, torch.float32)
        packed = torch.stack([measured[name] for name in self.names])
        for comm in self.comms:
            comm.all_reduce(packed, ReduceOp.MAX).wait()
        whole: Mapping[str, torch.Tensor] = dict(zip(self.names, packed.unbind(), strict=True))
        for kept, coded in self.held:
            for part in coded.parts:
                part.measured = whole[part.name].to(kept.device)
            coded.encode(kept)
