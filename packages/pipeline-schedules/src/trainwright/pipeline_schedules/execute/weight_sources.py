"""Whether a tensor is a parameter, or made of one in a way that backward may go later."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Nodes that keep no tensors, so that one part of a backward may pass them after another.
_PASSED = {
    "AliasBackward0",
    "CloneBackward0",
    "ExpandBackward0",
    "PermuteBackward0",
    "SelectBackward0",
    "SliceBackward0",
    "SplitBackward0",
    "SplitWithSizesBackward0",
    "SqueezeBackward1",
    "TBackward0",
    "ToCopyBackward0",
    "TransposeBackward0",
    "UnbindBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
}


def parameter_of(weight: torch.Tensor) -> nn.Parameter | None:
    """The parameter that a weight is, or is a cast or view of; None where it is anything else.

    Anything else may depend on the stage's input, or share history that is used up meanwhile.
    """
    if type(weight) is nn.Parameter:
        return weight
    if weight.is_leaf:
        return _plain_parameter(weight)
    node = weight.grad_fn
    while node is not None and node.name() in _PASSED:
        before = [function for function, _ in node.next_functions if function is not None]
        if len(before) != 1:
            return None
        node = before[0]
    leaf = getattr(node, "variable", None)
    return None if leaf is None else _plain_parameter(leaf)


def _plain_parameter(leaf: torch.Tensor) -> nn.Parameter | None:
    known = isinstance(leaf, nn.Parameter) and not is_traceable_wrapper_subclass(leaf)
    return leaf if known else None  # type: ignore[return-value]
