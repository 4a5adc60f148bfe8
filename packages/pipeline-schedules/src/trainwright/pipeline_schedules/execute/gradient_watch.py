"""Sees which modules get weight gradients in I, where the schedule would have them in W."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from trainwright.pipeline_schedules.execute.labels import module_labels
from trainwright.pipeline_schedules.execute.transfers import Slot
from trainwright.pipeline_schedules.execute.weight_gradients import WeightGradients


class GradientWatch:
    """Counts, for each module, the backwards of a step that did not leave its gradients to W.

    Args:
        debts: What was left to W.
    """

    def __init__(self, debts: WeightGradients) -> None:
        self.counts: Counter[str] = Counter()
        self.whole = 0
        self._debts = debts
        self._labels: dict[int, dict[nn.Parameter, str]] = {}

    @contextmanager
    def watching(self, slot: Slot, module: nn.Module) -> Iterator[None]:
        """Watch the I of a stage, which ``module`` is, and a microbatch."""
        stage = slot[0]
        if stage not in self._labels:
            self._labels[stage] = module_labels({stage: module})
        labels = self._labels[stage]
        before = [_state(parameter) for parameter in labels]
        yield
        pairs = zip(labels.items(), before, strict=True)
        seen = {label for (parameter, label), state in pairs if _changed(parameter, state)}
        self.counts.update(seen)
        self.whole += bool(seen) and slot not in self._debts.slots


_State = tuple[torch.Tensor | None, int]


def _state(parameter: nn.Parameter) -> _State:
    gradient = parameter.grad
    return gradient, 0 if gradient is None else gradient._version


def _changed(parameter: nn.Parameter, before: _State) -> bool:
    gradient, version = _state(parameter)
    return gradient is not before[0] or version != before[1]
