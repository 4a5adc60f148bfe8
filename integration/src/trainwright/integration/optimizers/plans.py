"""Which optimizer updates which parameters, and how much of each it has to see."""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import attrs
import torch
from torch import nn

from trainwright.collectives import ShardSpec
from trainwright.integration.errors import ConfigError
from trainwright.integration.optimizers.lion import Lion
from trainwright.sharding.data import ELEMENT_WISE, NOT_ELEMENT_WISE

Factory: TypeAlias = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Makes an optimizer of parameter groups, which say their weight decay."""

Rule: TypeAlias = Callable[[ShardSpec], bool]
"""Chooses a parameter as the plain model has it: ``spec.name``, ``spec.global_shape``."""

KNOWN = (*ELEMENT_WISE, Lion)
"""Optimizers whose update of an element depends on nothing but that element's own history."""

BLOCKS = "model.layers."
"""What the names of all parameters between embedding and head begin with."""


_REFUSED: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "evaluates the loss again and again in a step, which a run here does once",
    torch.optim.SparseAdam: "takes sparse gradients, which are dense here",
}


class Sees(enum.Enum):
    """What an optimizer has to see at once to update an element as it would in one process."""

    ELEMENTS = "elements"
    PARAMETERS = "whole parameters"
    MATRICES = "whole matrices"


@attrs.frozen
class Share:
    """One optimizer of a run and the parameters that it updates.

    Args:
        factory: makes it. It is called more than once: for what a rank keeps, for each whole, and
            for small parameters that show what it makes and keeps.
        sees: what it has to see at once. Of `Sees.MATRICES` a parameter of more than two dims is a
            stack, each matrix of which is a whole.
        takes: which parameters; of those that several take the first share has them.
    """

    factory: Factory
    sees: Sees = Sees.ELEMENTS
    takes: Rule = lambda spec: True


@attrs.frozen
class OptimizerPlan:
    """The optimizers of a run, which between them take every parameter.

    Args:
        name: what a checkpoint says of its states; another name's are refused.
        shares: in order.
    """

    name: str
    shares: tuple[Share, ...]


def element_wise(factory: Factory) -> OptimizerPlan:
    """Plan for an optimizer whose update of an element depends on that element's history alone."""
    return OptimizerPlan(_class_of(factory).__name__, (Share(factory),))


def whole_parameters(factory: Factory) -> OptimizerPlan:
    """Plan for an optimizer that has to see whole parameters: their rows, columns or norms."""
    return OptimizerPlan(_class_of(factory).__name__, (Share(factory, Sees.PARAMETERS),))


def whole_matrices(factory: Factory, rest: Factory) -> OptimizerPlan:
    """Plan for an optimizer of matrices only, and another, element-wise, of everything else.

    The first has the blocks' matrices, each expert's for itself; the second norms, biases,
    embeddings and the head, as is usual for Muon.
    """
    name = f"{_class_of(factory).__name__} and {_class_of(rest).__name__}"
    return OptimizerPlan(name, (Share(factory, Sees.MATRICES, is_hidden_matrix), Share(rest)))


def is_hidden_matrix(spec: ShardSpec) -> bool:
    """Whether a parameter is a matrix, or a stack of them, between embedding and head."""
    return spec.name.startswith(BLOCKS) and len(spec.global_shape) > 1


def plan_of(factory: Factory, rest: Factory) -> OptimizerPlan:
    """Plan for an optimizer by what is known of its class.

    Args:
        factory: makes an optimizer of ``torch.optim``, or `Lion`.
        rest: makes what updates all but matrices where ``factory`` makes an optimizer of matrices
            only.

    Raises:
        ConfigError: nothing is known of the class, or it cannot be used here.
    """
    kind = _class_of(factory)
    for refused, why in _REFUSED.items():
        if issubclass(kind, refused):
            raise ConfigError(f"{kind.__name__} {why}; choose another optimizer")
    if issubclass(kind, torch.optim.Muon):
        return whole_matrices(factory, rest)
    if issubclass(kind, tuple(NOT_ELEMENT_WISE)):
        return whole_parameters(factory)
    if kind in KNOWN:
        return element_wise(factory)
    raise ConfigError(
        f"{kind.__name__} is not an optimizer that is known to be element-wise, and ranks may keep "
        "parts of parameters only; say what it has to see: optimizers.element_wise(factory), "
        "whole_parameters(factory) or whole_matrices(factory, rest)"
    )


def _class_of(factory: Factory) -> type[torch.optim.Optimizer]:
    """Return what is made; one whose states only it can write and read is refused."""
    kind = _made_by(factory)
    plain = torch.optim.Optimizer
    if kind.state_dict is not plain.state_dict or kind.load_state_dict is not plain.load_state_dict:
        raise ConfigError(
            f"{kind.__name__} writes and reads its states in a form of its own, which checkpoints "
            "cannot hold by parameter for any layout; where it keeps or rounds weights of another "
            "optimizer, give that one: here every optimizer updates weights of at least float32"
        )
    return kind


def _made_by(factory: Factory) -> type[torch.optim.Optimizer]:
    made = factory.func if isinstance(factory, partial) else factory
    if isinstance(made, type) and issubclass(made, torch.optim.Optimizer):
        return made
    # A matrix: Muon takes nothing else.
    matrix = nn.Parameter(torch.zeros(2, 2))
    example = factory([{"params": [("matrix", matrix)], "weight_decay": 0.0}])
    if not isinstance(example, torch.optim.Optimizer):
        raise ConfigError(
            f"an optimizer must be a torch.optim.Optimizer, got a {type(example).__name__}; give a "
            "function of parameter groups that returns one"
        )
    return type(example)
