"""The order of calls that every loss scaler keeps, and its one decision for all ranks."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any, overload

import attrs
import torch

from trainwright.collectives import Communicator, ReduceOp
from trainwright.precision.errors import PrecisionError, ScalerOrderError
from trainwright.precision.gradients import refuse_lonely_decision, unscale_gradients_
from trainwright.precision.protocol import SteppableOptimizer
from trainwright.precision.scale_settings import as_count, positive_float32


class Stage(enum.Enum):
    """What was done with an optimizer in this iteration."""

    UNSCALED = "unscaled"
    STEPPED = "stepped"


@attrs.define(eq=False)
class Pending:
    """What is known of one optimizer since the last ``update``."""

    optimizer: SteppableOptimizer
    flags: list[torch.Tensor]
    agreed: bool
    stage: Stage = Stage.UNSCALED
    deferred: bool = False


class ScalerInALoop:
    """The order of calls and the one decision; the subclasses say what the scale does."""

    _allow_float16 = False

    def __init__(
        self,
        scale: float,
        communicator: Communicator | None,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
    ) -> None:
        self._scale = positive_float32("scale", scale)
        self._communicator = communicator
        self._names = {parameter: name for name, parameter in named_parameters}
        self._scale_on: dict[torch.device, torch.Tensor] = {}
        self._pending: dict[int, Pending] = {}
        self._non_finite = False
        self._loss_waits = False
        self._num_applied = 0
        self._num_skipped = 0

    @overload
    def scale(self, loss: torch.Tensor) -> torch.Tensor: ...
    @overload
    def scale(self, loss: list[torch.Tensor]) -> list[torch.Tensor]: ...
    @overload
    def scale(self, loss: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]: ...

    def scale(self, loss: Any) -> Any:
        """Return the loss times the scale, each of a list or tuple of losses alike.

        The product with a 16-bit loss is float32, so that it cannot overflow.

        Raises:
            ScalerOrderError: an optimizer has unscaled its gradients and not stepped; new gradients
                would be added to them still scaled.
        """
        for pending in self._pending.values():
            if pending.stage is Stage.UNSCALED:
                raise ScalerOrderError(
                    "scale() between unscale_(optimizer) and step(optimizer) would add scaled "
                    "gradients to unscaled ones; when accumulating, unscale and clip only once, "
                    "after the last backward pass"
                )
        if isinstance(loss, list | tuple):
            return type(loss)(self.scale(item) for item in loss)
        if not isinstance(loss, torch.Tensor):
            raise PrecisionError(f"a loss must be a tensor, got {type(loss).__name__}")
        self._loss_waits = True
        return self._times_scale(loss)

    def unscaled(self, value: torch.Tensor) -> torch.Tensor:
        """Return a quantity of the scaled gradients, such as their norm, in true units."""
        return value / self._scale_tensor(value.device)

    def unscale_(
        self, optimizer: SteppableOptimizer, *, non_finite: torch.Tensor | float | None = None
    ) -> None:
        """Divide the optimizer's gradients by the scale, and note whether all were finite.

        Args:
            optimizer: its parameters' gradients are divided in place, without host
                synchronisation.
            non_finite: a count of non-finite gradient elements that all ranks already share
                (0-d); the gradients are then not searched and nothing is communicated.

        Raises:
            ScalerOrderError: the gradients have been unscaled since the last ``update``.
            PrecisionError: a gradient is float16, a DTensor that is not summed yet, or one that
                other ranks hold parts of while this scaler has no communicator.
        """
        pending = self._pending.get(id(optimizer))
        if pending is not None and pending.stage is Stage.UNSCALED:
            raise ScalerOrderError(
                "unscale_() has been called on this optimizer since the last update(): its "
                "gradients would be divided twice; when accumulating, unscale and clip only once"
            )
        if pending is not None:
            raise ScalerOrderError(
                "unscale_() after step(): call update() to end the iteration first"
            )
        given = non_finite is not None
        if not given and self._communicator is None:
            refuse_lonely_decision(optimizer, self._names)
        flags = unscale_gradients_(
            optimizer, self._scale_now(), check=not given, allow_float16=self._allow_float16
        )
        if given:
            flags = [torch.as_tensor(non_finite)]
        self._pending[id(optimizer)] = Pending(optimizer, flags, agreed=given)

    def step(self, optimizer: SteppableOptimizer, *args: Any, **kwargs: Any) -> bool:
        """Step the optimizer unless a gradient was non-finite; unscale first where still due.

        The decision joins all ranks, and all optimizers unscaled so far: unscale each before the
        first is stepped, and either all are stepped or none.

        Args:
            optimizer: the optimizer to step.
            *args: passed on to ``optimizer.step``.
            **kwargs: passed on to ``optimizer.step``; a closure is refused.

        Returns:
            Whether the update was applied, the same on every rank. Step the learning-rate
            schedule only where it was.

        Raises:
            ScalerOrderError: stepped twice without ``update``.
            PrecisionError: a closure was given.

        Communicates:
            One all-reduce of 4 bytes, none where the count was given to ``unscale_``; the host
            waits for the device once.
        """
        pending = self._begin_step(optimizer, args, kwargs)
        skip = self._decide()
        if not skip:
            optimizer.step(*args, **kwargs)
        pending.stage = Stage.STEPPED
        return not skip

    def update(self) -> None:
        """End the iteration: count it, and adjust the scale by what its steps met.

        Raises:
            ScalerOrderError: nothing was unscaled or stepped in this iteration.
        """
        self._check_nothing_waits()
        if not self._pending:
            raise ScalerOrderError("update() without step(): nothing is known of the gradients")
        self._adjust(*self._end_iteration())

    def get_scale(self) -> float:
        """Return the current scale; only steps that were deferred are waited for."""
        self._settle()
        return self._scale

    @property
    def num_applied(self) -> int:
        """Iterations whose steps were applied."""
        self._settle()
        return self._num_applied

    @property
    def num_skipped(self) -> int:
        """Iterations whose steps were skipped."""
        self._settle()
        return self._num_skipped

    def state_dict(self) -> dict[str, Any]:
        """Return settings, scale and counters as plain numbers; take it after ``update``."""
        return {
            "scale": self._scale,
            "num_applied": self._num_applied,
            "num_skipped": self._num_skipped,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over settings, scale and counters, and forget an unfinished iteration.

        Raises:
            PrecisionError: no scale in the state, or one that is not positive and finite, or a
                count that is none; nothing is changed then.
        """
        if not isinstance(state_dict, Mapping) or "scale" not in state_dict:
            raise PrecisionError(
                f"the state of a loss scaler must hold 'scale', got {state_dict!s:.80}"
            )
        scale = positive_float32("scale", state_dict["scale"])
        applied, skipped = (
            as_count(name, state_dict.get(name, 0)) for name in ("num_applied", "num_skipped")
        )
        self._set_scale(scale)
        self._num_applied = applied
        self._num_skipped = skipped
        self._forget_iteration()

    def _begin_step(
        self, optimizer: SteppableOptimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Pending:
        if "closure" in kwargs or any(callable(argument) for argument in args):
            raise PrecisionError("step() takes no closure: it would run a backward pass unscaled")
        if id(optimizer) not in self._pending:
            self.unscale_(optimizer)
        pending = self._pending[id(optimizer)]
        if pending.stage is Stage.STEPPED:
            raise ScalerOrderError(
                "step() has been called on this optimizer since the last update(); "
                "call update() once at the end of each iteration"
            )
        return pending

    def _check_nothing_waits(self) -> None:
        # A new scale now would leave gradients of this iteration under two scales.
        if self._loss_waits and not self._pending:
            raise ScalerOrderError(
                "update() without step() after scale(loss): the gradients of that loss still hold "
                "the old scale; call update() once an iteration, after step()"
            )

    def _end_iteration(self) -> tuple[bool, list[SteppableOptimizer]]:
        """Count and forget the iteration; return whether it was skipped, and its optimizers."""
        skipped = self._decide()
        optimizers = [pending.optimizer for pending in self._pending.values()]
        self._forget_iteration()
        if optimizers:
            self._num_applied += not skipped
            self._num_skipped += skipped
        return skipped, optimizers

    def _forget_iteration(self) -> None:
        self._pending.clear()
        self._non_finite = False
        self._loss_waits = False

    def _settle(self) -> None:
        """Learn from the device what an update left there; nothing where the host decides."""

    def _scale_now(self) -> float | torch.Tensor:
        return self._scale

    def _times_scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self._scale_tensor(loss.device)

    def _scale_tensor(self, device: torch.device) -> torch.Tensor:
        if device not in self._scale_on:
            self._scale_on[device] = torch.tensor(self._scale, dtype=torch.float32, device=device)
        return self._scale_on[device]

    def _set_scale(self, scale: float) -> None:
        # New tensors, not a new value in the old ones: autograd may still hold those.
        if scale != self._scale:
            self._scale_on.clear()
        self._scale = scale

    def _decide(self) -> bool:
        """Say whether any gradient of this iteration was non-finite, on any rank."""
        own = [p for p in self._pending.values() if not p.agreed]
        flags = [flag for pending in own for flag in pending.flags]
        if own and self._communicator is not None:
            flags = [self._agree(flags, self._communicator)]
        for pending in self._pending.values():
            if pending not in own:
                flags.extend(pending.flags)
            pending.agreed = True
            pending.flags = []
        if flags:
            first = flags[0].device
            stacked = torch.stack([flag.to(first, torch.float32) for flag in flags])
            # A count that is itself NaN is not zero either.
            self._non_finite |= not bool((stacked == 0).all())
        return self._non_finite

    def _agree(self, flags: list[torch.Tensor], communicator: Communicator) -> torch.Tensor:
        agreed = torch.zeros((), dtype=torch.float32, device=communicator.device)
        for flag in flags:
            agreed += flag.to(agreed.device)
        communicator.all_reduce(agreed, ReduceOp.MAX).wait()
        return agreed

    def _adjust(self, non_finite: bool, optimizers: list[SteppableOptimizer]) -> None:
        """Let the scale follow; nothing for a constant scale."""
