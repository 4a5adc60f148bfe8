"""The loss scale that follows what the gradients bear."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

import attrs
import numpy as np
import torch

from trainwright.collectives import Communicator
from trainwright.precision.deferred import (
    Counters,
    ScaleOnDevice,
    Verdict,
    skips_by_itself,
    step_unless,
)
from trainwright.precision.errors import LossScaleError, PrecisionError
from trainwright.precision.gradients import first_non_finite
from trainwright.precision.iteration import ScalerInALoop, Stage
from trainwright.precision.protocol import SteppableOptimizer
from trainwright.precision.scale_settings import (
    Hysteresis,
    Settings,
    as_count,
    as_float,
    positive_float32,
    to_float32,
)


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
        self._settings = Settings(
            growth_factor, backoff_factor, growth_interval, patience.overflows, patience.refills
        )
        self._hysteresis_tracker = patience.overflows
        self._min_scale = min_scale
        self._growth_tracker = 0
        self._ahead: ScaleOnDevice | None = None
        if not 0.0 <= min_scale <= self._scale:
            raise PrecisionError(
                f"min_scale must be between 0 and init_scale, got min_scale={min_scale} with "
                f"init_scale={init_scale}"
            )

    def step_deferred(self, optimizer: SteppableOptimizer, *args: Any, **kwargs: Any) -> Verdict:
        """Do what `step` does without waiting: the optimizer's own kernels skip.

        Weights, moments and counts of steps are bit for bit those of `step`. The ``update`` that
        follows does not wait either: the scale follows on the device. Reading it (`get_scale`,
        `state_dict`, the counts of steps) waits. Optimizers that can skip by themselves are
        `torch.optim.Adam` and ``AdamW`` with ``fused=True``, and `MasterWeights` of these that
        keeps moments in float32; others are stepped by `step`, which waits.

        Args:
            optimizer: the optimizer to step.
            *args: passed on to ``optimizer.step``.
            **kwargs: passed on to ``optimizer.step``; a closure is refused.

        Returns:
            What is true where the update was applied, the same on every rank. Asked in the next
            iteration, to step a learning-rate schedule, it makes nobody wait for long.

        Raises:
            ScalerOrderError: stepped twice without ``update``.
            PrecisionError: a closure was given.

        Communicates:
            As `step` does.
        """
        if not skips_by_itself(optimizer):
            applied = self.step(optimizer, *args, **kwargs)
            return Verdict(torch.tensor(not applied))
        pending = self._begin_step(optimizer, args, kwargs)
        non_finite = self._decide_on_device()
        step_unless(optimizer, non_finite, args, kwargs)
        pending.stage, pending.deferred = Stage.STEPPED, True
        return Verdict(non_finite)

    def update(self, new_scale: float | None = None) -> None:
        """End the iteration: count it, and adjust the scale by what its steps met.

        Args:
            new_scale: the next scale, instead of the adjusted one; the count of clean steps stays.

        Raises:
            ScalerOrderError: nothing was unscaled or stepped in this iteration.
            LossScaleError: the scale fell below ``min_scale``; raised on every rank. After
                `step_deferred` by the update of the next iteration.
        """
        if new_scale is None and any(pending.deferred for pending in self._pending.values()):
            self._update_on_device()
            return
        self._settle()
        if new_scale is None:
            super().update()
            return
        wanted = positive_float32("new_scale", new_scale)
        self._check_nothing_waits()
        self._end_iteration()
        self._set_scale(wanted)

    def state_dict(self) -> dict[str, Any]:
        """Return settings, scale and counters as plain numbers; take it after ``update``."""
        self._settle()
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
        if not isinstance(state_dict, Mapping):
            raise PrecisionError(f"a state must be a dictionary, got {state_dict!s:.80}")
        state = {**optional, **state_dict}
        names = [field.name for field in attrs.fields(Settings)]
        missing = [key for key in [*names, "_growth_tracker"] if key not in state]
        if missing:
            raise PrecisionError(f"the state of a DynamicLossScaler must hold {missing}")
        settings = Settings(*(state[name] for name in names))
        tracker = as_count("_growth_tracker", state["_growth_tracker"])
        left = as_count(
            "_hysteresis_tracker", state.get("_hysteresis_tracker", settings.hysteresis)
        )
        min_scale = as_float("min_scale", state["min_scale"])
        if not 0.0 <= min_scale < float("inf"):
            raise PrecisionError(f"min_scale must be finite and at least 0, got {min_scale}")
        super().load_state_dict(state)
        self._ahead = None
        self._settings = settings
        self._growth_tracker = tracker
        self._hysteresis_tracker = left
        self._min_scale = min_scale

    def _scale_now(self) -> float | torch.Tensor:
        return self._scale if self._ahead is None else self._ahead.scale(self._ahead.device)

    def _scale_tensor(self, device: torch.device) -> torch.Tensor:
        return super()._scale_tensor(device) if self._ahead is None else self._ahead.scale(device)

    def _decide_on_device(self) -> torch.Tensor:
        """Return one where a gradient of this iteration was not finite, on any rank, else zero."""
        own = [pending for pending in self._pending.values() if not pending.agreed]
        flags = [flag for pending in own for flag in pending.flags]
        if own and self._communicator is not None:
            flags = [self._agree(flags, self._communicator)]
        flags.extend(f for p in self._pending.values() if p.agreed for f in p.flags)
        if self._non_finite or not flags:
            flags.append(torch.tensor(float(self._non_finite)))
        stacked = torch.stack([flag.to(flags[0].device, torch.float32) for flag in flags])
        non_finite = (stacked != 0).any().float()
        for pending in self._pending.values():
            pending.agreed, pending.flags = True, [non_finite]
        return non_finite

    def _update_on_device(self) -> None:
        non_finite = self._decide_on_device()
        if self._ahead is None:
            self._ahead = ScaleOnDevice(self._counters(), non_finite.device)
        elif self._ahead.arrived().failed:
            self._settle()
        self._ahead.advance(non_finite, self._settings, self._min_scale)
        self._forget_iteration()

    def _counters(self) -> Counters:
        trackers = self._growth_tracker, self._hysteresis_tracker
        return Counters(self._scale, *trackers, self._num_applied, self._num_skipped)

    def _settle(self) -> None:
        if self._ahead is None:
            return
        found, self._ahead = self._ahead.arrived(), None
        self._set_scale(found.scale)
        self._growth_tracker, self._hysteresis_tracker = found.growth, found.patience
        self._num_applied, self._num_skipped = found.num_applied, found.num_skipped
        if found.failed:
            optimizers = [pending.optimizer for pending in self._pending.values()]
            self._forget_iteration()
            self._back_off(optimizers)

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
