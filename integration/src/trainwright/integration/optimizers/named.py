"""Optimizers by name, with what each of them can be told."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
import torch

from trainwright.integration.errors import ConfigError
from trainwright.integration.optimizers.lion import Lion
from trainwright.integration.optimizers.plans import (
    Factory,
    OptimizerPlan,
    element_wise,
    whole_matrices,
    whole_parameters,
)

BETAS = (0.9, 0.95)
EPSILON = 1e-8
MATCH_ADAMW = "match_rms_adamw"
"""Muon's updates are scaled to the size of AdamW's, so that one learning rate fits both."""


@attrs.frozen
class Options:
    """What an optimizer is told beside learning rate and weight decay; None leaves its default.

    Args:
        beta1: how much of its first momentum AdamW, Adam or Lion keeps, beside Muon AdamW.
        beta2: how much of its second.
        eps: what AdamW and Adam add to a root.
        momentum: how much of it SGD or Muon keeps.
        nesterov: whether SGD or Muon looks ahead along the momentum.

    Raises:
        ConfigError: a value is out of its range.
    """

    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    momentum: float | None = None
    nesterov: bool | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("beta1", "beta2", "momentum"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < 1.0:
                raise ConfigError(f"--{name} must be from 0 to below 1, got {value}")
        if self.eps is not None and not self.eps > 0.0:
            raise ConfigError(f"--eps must be positive, got {self.eps}")

    @property
    def given(self) -> tuple[str, ...]:
        """The names of those that are not left to the optimizer."""
        return tuple(name for name, value in attrs.asdict(self).items() if value is not None)


@attrs.frozen
class Named:
    """An optimizer that a run can ask for by name.

    Args:
        uses: which options it uses.
        weight_decay: its default. Where the decay is part of the gradient it is none: there the
            usual 0.1 would be a hundred times too much.
        plan: makes the plan of the options.
    """

    uses: tuple[str, ...]
    weight_decay: float
    plan: Callable[[Options], OptimizerPlan]


def named_plan(name: str, options: Options | None = None) -> OptimizerPlan:
    """Return the plan of an optimizer by name.

    Args:
        name: one of `OPTIMIZERS`.
        options: what it is told.

    Raises:
        ConfigError: there is no such optimizer, or an option is given that it does not use.
    """
    options = options or Options()
    check_options(name, options)
    return named(name).plan(options)


def check_options(name: str, options: Options) -> None:
    """Refuse options that an optimizer does not use.

    Raises:
        ConfigError: there is no such optimizer, or an option is given that it does not use.
    """
    uses = named(name).uses
    for option in options.given:
        if option not in uses:
            raise ConfigError(
                f"--{option} is not used by --optimizer {name}, which takes "
                f"{', '.join(f'--{use}' for use in uses) or 'none of its kind'}; leave it out"
            )
    if options.nesterov and options.momentum == 0.0:
        raise ConfigError("--nesterov looks ahead along a momentum; give --momentum, such as 0.9")


def named(name: str) -> Named:
    """Return what is known of an optimizer by name.

    Raises:
        ConfigError: there is no such optimizer.
    """
    if name not in OPTIMIZERS:
        near = difflib.get_close_matches(name, OPTIMIZERS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"--optimizer must be one of {', '.join(OPTIMIZERS)}, got {name}{hint}")
    return OPTIMIZERS[name]


def adamw(options: Options) -> Factory:
    """Return what makes AdamW."""
    return partial(torch.optim.AdamW, **_adam_options(options))


def _adam(options: Options) -> OptimizerPlan:
    return element_wise(partial(torch.optim.Adam, **_adam_options(options)))


def _adam_options(options: Options) -> dict[str, Any]:
    return {
        "betas": _betas(options, BETAS),
        "eps": EPSILON if options.eps is None else options.eps,
        "fused": True,
    }


def _sgd(options: Options) -> OptimizerPlan:
    momentum = 0.9 if options.momentum is None else options.momentum
    nesterov = bool(options.nesterov)
    return element_wise(partial(torch.optim.SGD, momentum=momentum, nesterov=nesterov, fused=True))


def _lion(options: Options) -> OptimizerPlan:
    return element_wise(partial(Lion, betas=_betas(options, (0.9, 0.99))))


def _adafactor(options: Options) -> OptimizerPlan:
    return whole_parameters(torch.optim.Adafactor)


def _muon(options: Options) -> OptimizerPlan:
    muon = partial(
        torch.optim.Muon,
        momentum=0.95 if options.momentum is None else options.momentum,
        nesterov=True if options.nesterov is None else options.nesterov,
        adjust_lr_fn=MATCH_ADAMW,
    )
    return whole_matrices(muon, adamw(options))


def _betas(options: Options, default: tuple[float, float]) -> tuple[float, float]:
    first, second = default
    return (
        first if options.beta1 is None else options.beta1,
        second if options.beta2 is None else options.beta2,
    )


OPTIMIZERS: Mapping[str, Named] = {
    "adamw": Named(("beta1", "beta2", "eps"), 0.1, lambda options: element_wise(adamw(options))),
    "adam": Named(("beta1", "beta2", "eps"), 0.0, _adam),
    "sgd": Named(("momentum", "nesterov"), 0.0, _sgd),
    "lion": Named(("beta1", "beta2"), 0.1, _lion),
    "adafactor": Named((), 0.1, _adafactor),
    "muon": Named(("momentum", "nesterov", "beta1", "beta2", "eps"), 0.1, _muon),
}
"""The optimizers that a run can ask for by name."""
