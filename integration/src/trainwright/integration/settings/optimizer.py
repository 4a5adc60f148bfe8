"""What turns gradients into updates."""

from __future__ import annotations

import attrs

from trainwright.integration.optimizers.named import (
    OPTIMIZERS,
    Options,
    check_options,
    named,
    named_plan,
)
from trainwright.integration.optimizers.plans import OptimizerPlan
from trainwright.integration.settings.leaf import leaf
from trainwright.integration.values import not_negative, one_of, positive


@attrs.frozen
class OptimizerSettings:
    """The optimizer.

    Args:
        optimizer: one of `OPTIMIZERS`.
        lr: peak learning rate.
        weight_decay: of matrices; norms have none. None takes 0.1, and nothing with ``adam`` and
            ``sgd``, where it would be part of the gradient.
        beta1: how much of its first momentum the optimizer keeps; None takes its own default, here
            and below.
        beta2: how much of its second.
        eps: what AdamW and Adam add to a root.
        momentum: how much of it SGD or Muon keeps.
        nesterov: whether SGD or Muon looks ahead along the momentum.
        clip: largest gradient norm, of the gradients as they are; 0 leaves them so.

    Raises:
        ConfigError: the optimizer does not use a value that is given.
    """

    optimizer: str = leaf("adamw", f"one of {', '.join(OPTIMIZERS)}", one_of(tuple(OPTIMIZERS)))
    lr: float = leaf(2e-3, "peak learning rate", positive)
    weight_decay: float | None = leaf(
        None, "decay of matrices (default 0.1; 0 with adam and sgd)", not_negative
    )
    beta1: float | None = leaf(None, "of adamw, adam, lion (default 0.9)")
    beta2: float | None = leaf(None, "of adamw, adam (default 0.95), lion (0.99)")
    eps: float | None = leaf(None, "of adamw, adam (default 1e-8)")
    momentum: float | None = leaf(None, "of sgd (default 0.9), muon (0.95)")
    nesterov: bool | None = leaf(None, "of sgd (default no), muon (yes)")
    clip: float = leaf(1.0, "largest gradient norm; 0 leaves gradients as they are", not_negative)

    def __attrs_post_init__(self) -> None:
        check_options(self.optimizer, self._options)

    @property
    def plan(self) -> OptimizerPlan:
        """Which optimizer updates what."""
        return named_plan(self.optimizer, self._options)

    @property
    def decay(self) -> float:
        """The weight decay of matrices."""
        if self.weight_decay is None:
            return named(self.optimizer).weight_decay
        return self.weight_decay

    @property
    def _options(self) -> Options:
        return Options(self.beta1, self.beta2, self.eps, self.momentum, self.nesterov)
