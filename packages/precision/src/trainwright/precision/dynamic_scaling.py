"""The loss scale that follows what the gradients bear."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

import attrs
import numpy as np
import torch

from trainwright.collectives import Communicator
from trainwright.precision.errors import LossScaleError, PrecisionError
from trainwright.precision.gradients import first_non_finite
from trainwright.precision.iteration import ScalerInALoop, positive_float32, to_float32
from trainwright.precision.protocol import SteppableOptimizer


@attrs.frozen
class Hysteresis:
    """How many overflows the scale bears before it falls.

    The overflow numbered ``overflows`` lowers it, and each that follows lowers it again, until the
    count is refilled: when the scale grows, and, with ``refills``, at every clean step.

    Args:
        overflows: at least 1, which lowers the scale at every overflow.
        refills: False counts overflows since the scale last grew, as Megatron-LM does; DeepSpeed
            calls True ``consecutive_hysteresis``: only overflows in a row lower the scale.

    Raises:
        PrecisionError: the number of overflows is none, or ``refills`` no bool.
    """

    overflows: int = attrs.field()
    refills: bool = attrs.field(default=False)

    @overflows.validator
    def _check_overflows(self, _: object, value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PrecisionError(f"hysteresis must be a whole number from 1, got {value!r}")

    @refills.validator
    def _check_refills(self, _: object, value: bool) -> None:
        if not isinstance(value, bool):
            raise PrecisionError(f"refills must be True or False, got {value!r}")


@final
class DynamicLossScaler(ScalerInALoop):
    """A scale that halves when gradients overflow and doubles after a run of clean steps.

    The sequence of scales is that of ``torch.amp.GradScaler`` and the state loads into it and from
    it; the additions are the decision over ranks and optimizers, the returned verdict, the bound.

    Args:
        init_scale: the first scale.
        growth_factor: what the scale is multiplied by after ``growth_interval`` clean steps.
        backoff_factor: what it is multiplied by when a gradient is not finite.
        growth_interval: clean steps in a row that make it grow.
        hysteresis: `Hysteresis`, or a number of overflows: the scale falls at that one and at each
            after it, until it is refilled; 1 falls at every overflow, as torch's does.
        min_scale: falling below it is an error; 0.0 takes the bound away.
        communicator: the ranks that decide together; None where this process is alone or where
            ``unscale_`` is given a count that all ranks share.
        named_parameters: names for the error message, such as ``model.named_parameters()``.

    Raises:
        PrecisionError: a factor or an interval is out of its range.

    Source:
        Micikevicius et al., Mixed Precision Training, section 3.2.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        *,
        hysteresis: Hysteresis | int = 1,
        min_scale: float = 1.0,
        communicator: Communicator | None = None,
        named_parameters: Iterable[tuple[str, torch.Tensor]] = (),
    ) -> None:
        super().__init__(init_scale, communicator, named_parameters)
        patience = hysteresis if isinstance(hysteresis, Hysteresis) else Hysteresis(hysteresis)
        self._settings = _Settings(
            growth_factor, backoff_factor, growth_interval, patience.overflows, patience.refills
        )
        self._hysteresis_tracker = patience.overflows
        self._min_scale = min_scale
        self._growth_tracker = 0
        if not 0.0 <= min_scale <= self._scale:
            raise PrecisionError(
                f"min_scale must be between 0 and init_scale, got min_scale={min_scale} with "
                f"init_scale={init_scale}"
            )

    def update(self, new_scale: float | None = None) -> None:
        """End the iteration: count it, and adjust the scale by what its steps met.

        Args:
            new_scale: the next scale, instead of the adjusted one; the count of clean steps stays.

        Raises:
            ScalerOrderError: nothing was unscaled or stepped in this iteration.
            LossScaleError: the scale fell below ``min_scale``; raised on every rank.
        """
        if new_scale is None:
            super().update()
            return
        wanted = positive_float32("new_scale", new_scale)
        self._check_nothing_waits()
        self._end_iteration()
        self._set_scale(wanted)

    def state_dict(self) -> dict[str, Any]:
        """Return settings, scale and counters as plain numbers; take it after ``update``."""
        return {
            **super().state_dict(),
            **attrs.asdict(self._settings),
            "min_scale": self._min_scale,
            "_growth_tracker": self._growth_tracker,
            "_hysteresis_tracker": self._hysteresis_tracker,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over settings, scale and counters; the state may be one of a GradScaler's.

        What such a state has not, the bound and the hysteresis, stays as this scaler was made.

        Raises:
            PrecisionError: an entry is missing or out of its range; nothing is changed then.
        """
        own = {**attrs.asdict(self._settings), "min_scale": self._min_scale}
        optional = {key: own[key] for key in ("hysteresis", "hysteresis_refills", "min_scale")}
        state = {**optional, **state_dict}
        names = [field.name for field in attrs.fields(_Settings)]
        missing = [key for key in [*names, "_growth_tracker"] if key not in state]
        if missing:
            raise PrecisionError(f"the state of a DynamicLossScaler must hold {missing}")
        settings = _Settings(*(state[name] for name in names))
        tracker = int(state["_growth_tracker"])
        left = int(state.get("_hysteresis_tracker", settings.hysteresis))
        min_scale = float(state["min_scale"])
        super().load_state_dict(state)
        self._settings = settings
        self._growth_tracker = tracker
        self._hysteresis_tracker = left
        self._min_scale = min_scale

    def _adjust(self, non_finite: bool, optimizers: list[SteppableOptimizer]) -> None:
        if non_finite:
            self._growth_tracker = 0
            if self._hysteresis_tracker > 1:
                self._hysteresis_tracker -= 1
            else:
                self._back_off(optimizers)
            return
        if self._settings.hysteresis_refills:
            self._hysteresis_tracker = self._settings.hysteresis
        self._growth_tracker += 1
        if self._growth_tracker < self._settings.growth_interval:
            return
        self._growth_tracker = 0
        self._hysteresis_tracker = self._settings.hysteresis
        grown = to_float32(self._scale * self._settings.growth_factor)
        if np.isfinite(grown):
            self._set_scale(grown)

    def _back_off(self, optimizers: list[SteppableOptimizer]) -> None:
        smaller = to_float32(self._scale * self._settings.backoff_factor)
        if smaller >= self._min_scale and smaller > 0.0:
            self._set_scale(smaller)
            return
        rank = self._communicator.rank if self._communicator is not None else 0
        named = (first_non_finite(optimizer, self._names) for optimizer in optimizers)
        culprit = next((name for name in named if name is not None), None)
        where = (
            f"the first non-finite gradient on rank {rank} is that of {culprit}"
            if culprit is not None
            else f"no gradient on rank {rank} is non-finite now, see the other ranks' messages"
        )
        raise LossScaleError(
            f"the loss scale would fall from {self._scale} to {smaller}, below its bound "
            f"{self._min_scale}: gradients are not finite at any scale; {where}; look for a bad "
            "batch, a division by zero or a too high learning rate there, or use bfloat16"
        )


@attrs.frozen
class _Settings:
    growth_factor: float = attrs.field()
    backoff_factor: float = attrs.field()
    growth_interval: int = attrs.field()
    hysteresis: int = 1
    hysteresis_refills: bool = False

    def __attrs_post_init__(self) -> None:
        Hysteresis(self.hysteresis, self.hysteresis_refills)

    @growth_factor.validator
    def _check_growth_factor(self, _: object, value: float) -> None:
        if not (1.0 < value < float("inf")):
            raise PrecisionError(f"growth_factor must be above 1 and finite, got {value}")

    @backoff_factor.validator
    def _check_backoff_factor(self, _: object, value: float) -> None:
        if not 0.0 < value < 1.0:
            raise PrecisionError(f"backoff_factor must be between 0 and 1, got {value}")

    @growth_interval.validator
    def _check_growth_interval(self, _: object, value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PrecisionError(f"growth_interval must be a whole number from 1, got {value!r}")
