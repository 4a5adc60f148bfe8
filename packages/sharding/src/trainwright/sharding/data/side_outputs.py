"""Tensors that a module leaves in attributes, such as the auxiliary loss of a mixture."""

from __future__ import annotations

import torch
from torch import nn

from trainwright.sharding.data.graph import nodes_since

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class SideOutputs:
    """Remembers which attributes of which modules get differentiable tensors.

    All attributes are looked at in a module's first forward, later only those found then.
    """

    def __init__(self) -> None:
        self._found: dict[nn.Module, list[tuple[nn.Module, str]]] = {}

    def find(self, module: nn.Module, start: int) -> list[object]:
        """Return what the attributes hold that tensors made since ``start`` were put into."""
        if module not in self._found:
            self._found[module] = [
                (inner, name)
                for inner in module.modules()
                for name, value in vars(inner).items()
                if name not in _OF_EVERY_MODULE
                and isinstance(value, torch.Tensor | list | tuple | dict)
                and nodes_since(start, value)
            ]
        return [getattr(inner, name, None) for inner, name in self._found[module]]
