"""The part of the flat buffers that one collective reduces, and this rank's range of it."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import nn

from trainwright.collectives import Communicator, Work
from trainwright.sharding.data.errors import LifecycleError
from trainwright.sharding.data.parameters import Owner
from trainwright.sharding.data.piece import Piece


@attrs.define(eq=False)
class Member:
    """A trainable parameter of the module and its places in the flat buffers.

    Args:
        name: The parameter's name.
        parameter: The module's parameter.
        owners: Every place that holds it.
        weight: Its view of the weight buffer, which the parameter shares.
        gradient: Its view of the gradient buffer, where gradients accumulate.
        epoch: The last armed backward that completed its gradient.
        version: The parameter's version counter when its weights were last known to be right.
    """

    name: str
    parameter: nn.Parameter
    owners: tuple[Owner, ...]
    weight: torch.Tensor
    gradient: torch.Tensor
    epoch: int = 0
    version: int = 0

    def link_gradient(self) -> None:
        """Move what stands in ``parameter.grad`` into the buffer and let it be a view of that.

        ``parameter.grad`` is what counts: None there is a gradient of zero, so that a gradient
        that PyTorch's own ``zero_grad`` threw away does not come back from the buffer.
        """
        found = self.parameter.grad
        if found is self.gradient:
            return
        if found is None:
            self.gradient.zero_()
        elif found.layout is not torch.strided:
            raise LifecycleError(
                f"{self.name} has a {found.layout} gradient, which flat buffers cannot hold; "
                "use dense gradients (sparse=False)"
            )
        else:
            self.gradient.copy_(found.detach())
        self.parameter.grad = self.gradient

    def check_linked(self) -> None:
        """Raise if the gradient was replaced while it was being reduced."""
        if self.parameter.grad is not self.gradient:
            raise LifecycleError(
                f"the gradient of {self.name} was replaced or set to None between reduce() and "
                "wait(); leave gradients alone until wait() has returned"
            )

    def return_weight(self) -> None:
        """Copy a weight that left the flat buffer back into it and share it again."""
        data = self.parameter.data
        if data.data_ptr() == self.weight.data_ptr():
            return
        if (data.shape, data.dtype, data.device) != (
            self.weight.shape,
            self.weight.dtype,
            self.weight.device,
        ):
            raise LifecycleError(
                f"{self.name} is now {tuple(data.shape)} {data.dtype} on {data.device}, its flat "
                f"buffer {tuple(self.weight.shape)} {self.weight.dtype} on {self.weight.device}; "
                "convert or move a model before data_parallel()"
            )
        self.weight.copy_(data)
        self.parameter.data = self.weight

    def check_intact(self) -> None:
        """Raise if the module no longer trains this parameter in this memory."""
        for module, attribute in self.owners:
            if module._parameters.get(attribute) is not self.parameter:
                raise LifecycleError(
                    f"{self.name} was replaced by another parameter after data_parallel(); "
                    "load weights in place (load_state_dict without assign=True), then call "
                    "load_masters()"
                )
        if not self.parameter.requires_grad:
            raise LifecycleError(
                f"{self.name} was frozen after data_parallel(); set requires_grad before it"
            )
        if self.parameter.data_ptr() != self.weight.data_ptr():
            raise LifecycleError(
                f"{self.name} left the flat buffer (model.to(), parameter.data = …); call "
                "load_masters() to copy its weights back"
            )


@attrs.frozen(eq=False)
class KeptPiece:
    """A piece and its part of the gradient buffer."""

    piece: Piece
    gradient: torch.Tensor


@attrs.define(eq=False)
class Bucket:
    """Consecutive elements of a group's buffers; at stage 1 a rank keeps only a range of them.

    Args:
        members: The parameters in it.
        data: Joins the ranks that the gradients are summed over first.
        partial: Joins the ranks whose sums are added afterwards, on the kept range.
        sharded: Whether a rank keeps only its range.
        wire_dtype: Dtype in which gradients travel.
        gradients: All elements.
        kept_gradients: This rank's range of them.
        weights: All elements, which the module's parameters are views of.
        kept_weights: This rank's range of them.
        kept_masters: The weights that the optimizer updates; may be ``kept_weights``.
        kept: The pieces of parameters in this rank's range.
        pending: Members whose gradients the armed backward has not completed yet.
        started: Whether its reduction has begun; nothing may be written to it until zeroed.
    """

    members: Sequence[Member]
    data: Communicator
    partial: Sequence[Communicator]
    sharded: bool
    wire_dtype: torch.dtype
    gradients: torch.Tensor
    kept_gradients: torch.Tensor
    weights: torch.Tensor
    kept_weights: torch.Tensor
    kept_masters: torch.Tensor
    kept: list[KeptPiece] = attrs.field(factory=list)
    pending: int = 0
    started: bool = False
    _wire: torch.Tensor | None = None
    _works: list[Work] = attrs.field(factory=list)

    @property
    def separate_masters(self) -> bool:
        """Whether the optimizer's weights are other memory than the module's."""
        return self.kept_masters is not self.kept_weights

    def start_reduction(self) -> None:
        """Start summing the gradients over the data ranks; they belong to it until finished."""
        for member in self.members:
            member.link_gradient()
        self.started = True
        if self.data.size == 1:
            return
        kept = self.kept_gradients
        wire = self.gradients
        if self.wire_dtype != wire.dtype:
            wire = wire.to(self.wire_dtype)
            offset = kept.storage_offset() - self.gradients.storage_offset()
            kept = wire[offset : offset + kept.numel()]
            self._wire = kept
        if self.sharded:
            self._works.append(self.data.reduce_scatter(kept, wire))
        else:
            self._works.append(self.data.all_reduce(wire))

    def finish_data_reduction(self) -> None:
        """Wait for the data ranks, then start the sums over the other axes on the kept range."""
        self._wait()
        if self._wire is not None:
            self.kept_gradients.copy_(self._wire)
            self._wire = None
        for communicator in self.partial:
            self._wait()
            self._works.append(communicator.all_reduce(self.kept_gradients))

    def finish_reduction(self) -> None:
        """Wait for everything started."""
        self._wait()

    def start_publishing(self) -> None:
        """Copy this rank's masters into the module's weights and start collecting the others'."""
        if self.separate_masters:
            self.kept_weights.copy_(self.kept_masters)
        if self.sharded and self.data.size > 1:
            self._works.append(self.data.all_gather(self.weights, self.kept_weights))

    def finish_publishing(self) -> None:
        """Wait until the module's weights are those of all ranks."""
        self._wait()

    def load_masters(self) -> None:
        """Make this rank's masters equal to the module's weights."""
        if self.separate_masters:
            self.kept_masters.copy_(self.kept_weights)

    def _wait(self) -> None:
        works = self._works
        self._works = []
        for work in works:
            work.wait()
