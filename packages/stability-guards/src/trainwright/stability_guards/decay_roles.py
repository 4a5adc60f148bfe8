"""Which parameters of a model decay, by the modules that own them."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import nn

from trainwright.stability_guards.errors import GuardError
from trainwright.stability_guards.schedules import Rates

NORMS: tuple[type[nn.Module], ...] = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,
)
"""Modules all of whose parameters are gains and shifts, of however many dims."""


def decay_roles(
    model: nn.Module,
    *,
    embeddings: bool = False,
    exempt: tuple[type[nn.Module], ...] = (),
) -> dict[str, bool]:
    """Return whether each parameter decays: those of norms and embeddings and biases do not.

    It goes by types of modules and by what they hold, never by parts of names: an embedding is an
    ``nn.Embedding``, an ``nn.EmbeddingBag`` or a module with ``num_embeddings`` and
    ``embedding_dim``; a bias is what a module calls ``bias``, ``bias_k`` or ``bias_v``; and nothing
    of fewer than two dims decays, which are the norms and biases of foreign modules.

    Args:
        model: the plain model, before it is cut.
        embeddings: let embeddings decay as matrices do.
        exempt: further types of modules whose own parameters do not decay.

    Returns:
        By every name, those of tied parameters too, for the ``roles`` of `decay_groups`. A tied
        parameter does not decay if one of its owners exempts it, as the embedding does the head.
    """
    spared: set[torch.Tensor] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if (
                parameter.ndim < 2
                or isinstance(module, (*NORMS, *exempt))
                or (_is_embedding(module) and not embeddings)
                or any(parameter is bias for bias in _biases(module))
            ):
                spared.add(parameter)
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter not in spared for name, parameter in named}


def decay_setter(optimizer: torch.optim.Optimizer) -> Callable[[float], None]:
    """Return what sets the weight decay of an optimizer's groups, of those that decay now.

    Call it before each step with the value of a schedule, such as `Transition` or `SquareOf`.
    Groups keep their ratio to the greatest decay, and those without one never decay.

    Args:
        optimizer: groups as `decay_groups` makes them; it may load a state later.

    Raises:
        GuardError: no group decays.
    """
    decays = [float(group["weight_decay"]) for group in optimizer.param_groups]
    greatest = max(decays, default=0.0)
    if greatest == 0.0:
        raise GuardError("no group of the optimizer decays; give those that shall a weight_decay")
    shares = [decay / greatest for decay in decays]

    def set_decay(value: float) -> None:
        if not value >= 0.0:
            raise GuardError(f"weight decay must be from 0, got {value}")
        # Groups are looked up anew: a loaded state replaces them.
        for group, share in zip(optimizer.param_groups, shares, strict=True):
            group["weight_decay"] = value * share

    return set_decay


@attrs.frozen
class SquareOf:
    """The square of a schedule: PaLM's weight decay is that of its learning rate."""

    schedule: Rates

    @property
    def peak(self) -> float:
        """The greatest value."""
        return self.schedule.peak**2

    def __call__(self, update: int) -> float:
        """Return the value at the update with this number, counted from 0."""
        return self.schedule(update) ** 2

    def over(self, start: int, stop: int) -> float:
        """Return the value at an update that consumes the units from start to stop, exclusive."""
        return self.schedule.over(start, stop) ** 2


def _is_embedding(module: nn.Module) -> bool:
    return hasattr(module, "num_embeddings") and hasattr(module, "embedding_dim")


def _biases(module: nn.Module) -> list[object]:
    return [getattr(module, name, None) for name in ("bias", "bias_k", "bias_v")]
