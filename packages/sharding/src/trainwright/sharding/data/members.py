"""A parameter's places in the flat buffers, and the checks that it is still there."""

from __future__ import annotations

import attrs
import torch
from torch import nn

from trainwright.sharding.data.errors import LifecycleError
from trainwright.sharding.data.parameters import Owner


@attrs.define(eq=False)
class Member:
    """A parameter of the module and its places in a bucket's flat buffers.

    Args:
        name: The parameter's name.
        parameter: The module's parameter.
        owners: Every place that holds it.
        weight: Its view of the weights, which the parameter shares while they are whole.
        place: Where both lie in the bucket.
        is_trained: Whether it has gradients.
        gradient: Its view of the gradients, where they accumulate; None while they have no memory.
        absent: What the parameter is while its weights are released: NaN in its shape, without
            memory; None where they never are.
        version: The parameter's version counter when its weights were last known to be right.
        epoch: The last counted backward that completed its gradient.
    """

    name: str
    parameter: nn.Parameter
    owners: tuple[Owner, ...]
    weight: torch.Tensor
    place: slice
    is_trained: bool
    gradient: torch.Tensor | None = None
    absent: torch.Tensor | None = None
    version: int = 0
    epoch: int = 0

    def link_gradient(self) -> None:
        """Move what stands in ``parameter.grad`` into the buffer and let it be a view of that.

        ``parameter.grad`` is what counts: None there is a gradient of zero, so that a gradient
        that PyTorch's own ``zero_grad`` threw away does not come back from the buffer.
        """
        found = self.parameter.grad
        gradient = self.gradient
        assert gradient is not None
        if found is gradient:
            return
        if found is None:
            gradient.zero_()
        elif found.layout is not torch.strided:
            raise LifecycleError(
                f"{self.name} has a {found.layout} gradient, which flat buffers cannot hold; "
                "use dense gradients (sparse=False)"
            )
        else:
            gradient.copy_(found.detach())
        self.parameter.grad = gradient

    def check_linked(self) -> None:
        """Raise if the gradient was replaced while it was being reduced."""
        if self.parameter.grad is not self.gradient:
            raise LifecycleError(
                f"the gradient of {self.name} was replaced or set to None between reduce() and "
                "wait(); leave gradients alone until wait() has returned"
            )

    def show(self) -> None:
        """Let the parameter be its whole weight."""
        self.parameter.data = self.weight

    def hide(self) -> None:
        """Let the parameter be NaN, as its weight is about to be released."""
        assert self.absent is not None
        self.check_place(self.weight)
        self.parameter.data = self.absent

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

    def check_intact(self, *, released: bool) -> None:
        """Raise if the module no longer has this parameter in this memory."""
        for module, attribute in self.owners:
            if module._parameters.get(attribute) is not self.parameter:
                raise LifecycleError(
                    f"{self.name} was replaced by another parameter after data_parallel(); "
                    "load weights in place (load_state_dict without assign=True), then call "
                    "load_masters()"
                )
        trained = self.parameter.requires_grad
        if trained and not self.is_trained:
            raise LifecycleError(
                f"{self.name} was frozen when data_parallel() was called and nobody reduces its "
                "gradient; set requires_grad before it"
            )
        if not trained and self.is_trained:
            raise LifecycleError(
                f"{self.name} was frozen after data_parallel(); set requires_grad before it"
            )
        self.check_place(self.absent if released and self.absent is not None else self.weight)

    def check_place(self, expected: torch.Tensor) -> None:
        """Raise if the parameter is in other memory than expected."""
        if self.parameter.data_ptr() != expected.data_ptr():
            raise LifecycleError(
                f"{self.name} left the flat buffer (model.to(), parameter.data = …); call "
                "load_masters() to copy its weights back"
            )
