"""Kinds of modules that stay in at least float32, found by what they hold, not by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.loss import _Loss

ModuleKind = Callable[[nn.Module], Iterable[nn.Module]]
"""Finds the modules of one kind in a whole model; those found stay in at least float32."""

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.LocalResponseNorm, _NormBase)
_SOFTMAXES = (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d, nn.AdaptiveLogSoftmaxWithLoss)


def norms(root: nn.Module) -> Iterator[nn.Module]:
    """Yield torch's norms, and modules that multiply or shift by vectors only.

    These are the norms that models bring along, and layer scales: all their parameters have at
    most one dim, and no module within holds parameters.
    """
    for module in root.modules():
        if isinstance(module, _NORMS):
            yield module
            continue
        own = _floating(module)
        if own and all(parameter.ndim <= 1 for parameter in own):
            total = sum(1 for _ in module.parameters())
            if total == sum(1 for _ in module.parameters(recurse=False)):
                yield module


def softmaxes(root: nn.Module) -> Iterator[nn.Module]:
    """Yield torch's softmax modules; kernels behind functions sum in float32 by themselves."""
    yield from (module for module in root.modules() if isinstance(module, _SOFTMAXES))


def losses(root: nn.Module) -> Iterator[nn.Module]:
    """Yield torch's loss modules and what is derived from them."""
    yield from (module for module in root.modules() if isinstance(module, _Loss))


def routers(root: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules beside a set of experts that give one score for each expert.

    Experts are a list of modules alike that hold matrices and no norm, or parameters stacked
    [experts, ...] in three dims. A score comes from a matrix [experts, features].
    """
    for parent in root.modules():
        children = list(parent.children())
        counts = {child: _num_experts(child) for child in children}
        stacked = {parameter.shape[0] for parameter in _floating(parent) if parameter.ndim == 3}
        wanted = {count for count in [*counts.values(), *stacked] if count > 1}
        if not wanted or isinstance(parent, _ConvNd):
            continue
        for child in children:
            if counts[child] == 0:
                yield from (m for m in child.modules() if _num_scores(m) in wanted)


KINDS: tuple[ModuleKind, ...] = (norms, softmaxes, losses, routers)
"""What a `DtypePolicy` keeps unless it is told otherwise."""


def _floating(module: nn.Module) -> list[torch.Tensor]:
    return [p for p in module.parameters(recurse=False) if p.is_floating_point()]


def _num_experts(module: nn.Module) -> int:
    if isinstance(module, nn.ModuleList):
        same = len({type(item) for item in module}) == 1
        experts = same and all(_is_expert(item) for item in module)
        return len(module) if experts else 0
    own = _floating(module)
    if not own or isinstance(module, _ConvNd) or max(parameter.ndim for parameter in own) != 3:
        return 0
    sizes = {parameter.shape[0] for parameter in own}
    return sizes.pop() if len(sizes) == 1 else 0


def _is_expert(module: nn.Module) -> bool:
    has_matrix = any(p.ndim == 2 and p.is_floating_point() for p in module.parameters())
    return has_matrix and next(norms(module), None) is None


def _num_scores(module: nn.Module) -> int:
    matrices = [parameter for parameter in _floating(module) if parameter.ndim == 2]
    is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    return matrices[0].shape[0] if len(matrices) == 1 and not is_table else 0
