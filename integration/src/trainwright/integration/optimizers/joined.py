"""The optimizers of a plan as one, over what this rank keeps of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import nn

from trainwright.integration.errors import ConfigError
from trainwright.integration.optimizers.plans import Factory, OptimizerPlan, Sees, Share
from trainwright.sharding import ShardingError
from trainwright.sharding.data import (
    DataParallel,
    Piece,
    WholeMatrices,
    offloaded_step,
    trained_specs,
)
from trainwright.sharding.offload import Offload, OffloadedStep
from trainwright.stability_guards import decay_groups


@attrs.frozen(eq=False)
class Member:
    """One of the optimizers that were joined.

    Args:
        optimizer: it.
        factory: made it, and makes others like it; None of `WholeMatrices`, which holds its own.
        pieces: what it updates, by name.
    """

    optimizer: torch.optim.Optimizer
    pieces: Mapping[str, Piece]
    factory: Factory | None = None


class JoinedOptimizer(torch.optim.Optimizer):
    """Several optimizers that step as one, such as Muon of matrices and AdamW of the rest.

    Its ``param_groups`` are theirs, so that what is set there reaches them.

    Args:
        name: what a checkpoint says of their states.
        members: the optimizers; every rank of a pipeline stage has as many, in the same order.
        lr: the learning rate that they were made with; a group may have been given another one.
        steps: what steps each of them where their states are offloaded; empty: they do themselves.
    """

    def __init__(
        self, name: str, members: Sequence[Member], lr: float, steps: Sequence[OffloadedStep] = ()
    ) -> None:
        self.name = name
        self.lr = lr
        self.members = tuple(members)
        self.steps = tuple(steps)
        super().__init__([{"params": [], "param_names": []}], {})
        self.param_groups = [g for each in self.members for g in each.optimizer.param_groups]
        for each in self.members:
            if not isinstance(each.optimizer, WholeMatrices):
                self.state = each.optimizer.state  # what is kept of pieces is found here as well
        self._shares = [float(group["lr"]) / lr for group in self.param_groups]

    def set_rate(self, lr: float) -> None:
        """Set the learning rate; a group that was made with another one keeps its share of it."""
        for group, share in zip(self.param_groups, self._shares, strict=True):
            group["lr"] = lr * share

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step each of the optimizers; what they communicate, this does.

        Raises:
            ConfigError: a closure was given.
        """
        if closure is not None:
            raise ConfigError("the optimizer's step takes no closure; evaluate the loss before it")
        for each in self.steps or [member.optimizer for member in self.members]:
            each.step()

    def take_in(self, parameter: nn.Parameter) -> None:
        """Put states of a parameter that were just made where they are kept, if offloaded."""
        for each in self.steps:
            each.take_in(parameter)


def offloaded(
    optimizer: JoinedOptimizer, models: Iterable[DataParallel], offload: Offload | None
) -> JoinedOptimizer:
    """Return an optimizer that updates states where they are kept.

    Args:
        optimizer: built over the models.
        models: what shares out the states of this rank's parts of the model.
        offload: keeps them; None: they stay on the device.

    Raises:
        ConfigError: on every rank: one of the optimizers cannot be offloaded, or there is no space.

    Communicates: with ``offload`` one all-reduce of 8 bytes over the world for each optimizer.
    """
    if offload is None:
        return optimizer
    kept = list(models)
    try:
        steps = [offloaded_step(each.optimizer, kept, offload) for each in optimizer.members]
    except ShardingError as error:
        raise ConfigError(f"--offload: {error}") from error
    return JoinedOptimizer(optimizer.name, optimizer.members, optimizer.lr, steps)


def build(
    plan: OptimizerPlan, models: Iterable[DataParallel], *, lr: float, weight_decay: float | None
) -> JoinedOptimizer:
    """Build the optimizers of a plan over what this rank keeps of some models.

    Weights of two and more dims decay, vectors and scalars do not, by their dims in the plain
    model.

    Args:
        plan: which optimizers.
        models: what shares out the states of this rank's parts of the model.
        lr: learning rate of the first step, unless something sets another one.
        weight_decay: of matrices; None leaves it to what makes the optimizers.

    Raises:
        ConfigError: an optimizer has no weight decay, but one is asked for.

    Communicates: what `WholeMatrices` says, for each model and each kind of share.
    """
    kept = list(models)
    specs = {name: spec for model in kept for name, spec in trained_specs(model).items()}
    chosen = {
        name: next(at for at, share in enumerate(plan.shares) if share.takes(spec))
        for name, spec in specs.items()
    }
    decaying = _decaying(specs)
    members: list[Member] = []
    for at, share in enumerate(plan.shares):
        names = [name for name in specs if chosen[name] == at]
        factory = _with_rate(share.factory, lr, weight_decay)
        if share.sees is Sees.ELEMENTS:
            members.append(_on_pieces(factory, kept, names, weight_decay, decaying))
        else:
            members += _on_wholes(share, factory, kept, names, weight_decay, decaying)
    return JoinedOptimizer(plan.name, members, lr)


def _decaying(specs: Mapping[str, Any]) -> frozenset[str]:
    plain = [
        (name, nn.Parameter(torch.empty(spec.global_shape, device="meta")))
        for name, spec in specs.items()
    ]
    return frozenset(name for name, _ in decay_groups(plain, 0.0)[0]["params"])


def _with_rate(factory: Factory, lr: float, weight_decay: float | None) -> Factory:
    """Return what makes the same optimizer with a learning rate in each group."""

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        made = factory([{**group, "lr": lr} for group in groups])
        if weight_decay and "weight_decay" not in made.defaults:
            raise ConfigError(f"{type(made).__name__} has no weight decay; choose --weight-decay 0")
        return made

    return make


def _on_pieces(
    factory: Factory,
    models: Sequence[DataParallel],
    names: Sequence[str],
    weight_decay: float | None,
    decaying: frozenset[str],
) -> Member:
    wanted = set(names)
    pieces = {n: piece for m in models for n, piece in m.pieces.items() if n in wanted}
    groups = decay_groups(
        [(name, piece.parameter) for name, piece in pieces.items()],
        weight_decay or 0.0,
        roles={name: name in decaying for name in pieces},
    )
    if weight_decay is None:
        del groups[0]["weight_decay"]
    return Member(factory(groups), pieces, factory)


def _on_wholes(
    share: Share,
    factory: Factory,
    models: Sequence[DataParallel],
    names: Sequence[str],
    weight_decay: float | None,
    decaying: frozenset[str],
) -> list[Member]:
    members: list[Member] = []
    for model in models:
        for decays in (True, False):
            here = [n for n in names if n in trained_specs(model) and (n in decaying) is decays]
            if not here:
                continue
            options = {"weight_decay": weight_decay if decays else 0.0}
            if decays and weight_decay is None:
                options = {}
            make = partial(_of_one, factory, options)
            stacked = share.sees is Sees.MATRICES
            wholes = WholeMatrices(model, here, make, stacked=stacked)
            pieces = {name: piece for name, piece in model.pieces.items() if name in here}
            members.append(Member(wholes, pieces))
    return members


def _of_one(
    factory: Factory, options: Mapping[str, Any], whole: list[nn.Parameter]
) -> torch.optim.Optimizer:
    return factory([{"params": whole, **options}])
