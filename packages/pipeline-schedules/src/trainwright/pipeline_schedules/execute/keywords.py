"""Who gets which of the last stage's inputs: the stage, the loss, or both."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainwright.pipeline_schedules.execute.errors import PipelineError
from trainwright.pipeline_schedules.execute.protocol import Loss


class KeywordSplit:
    """Deals the last stage's inputs out to stage and loss, by the names that each of them takes.

    What takes ``**kwargs`` is given everything, a name that both take goes to both.

    Args:
        stage: The module on the last stage.
        loss: Called with its output.
    """

    def __init__(self, stage: torch.nn.Module, loss: Loss) -> None:
        self._for_stage = _keyword_names(stage.forward, taken=0)
        loss_call = loss.forward if isinstance(loss, torch.nn.Module) else loss
        self._for_loss = _keyword_names(loss_call, taken=1)

    def split(self, inputs: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The inputs of the stage and those of the loss.

        Raises:
            PipelineError: A name that neither of them takes.
        """
        for_stage = _chosen(inputs, self._for_stage)
        for_loss = _chosen(inputs, self._for_loss)
        unused = inputs.keys() - for_stage.keys() - for_loss.keys()
        if unused:
            raise PipelineError(
                f"inputs of the last stage hold {sorted(unused)}, which neither the stage "
                f"(takes {sorted(self._for_stage or ())}) nor the loss "
                f"(takes {sorted(self._for_loss or ())}) has a parameter for"
            )
        return for_stage, for_loss


def _chosen(inputs: Mapping[str, Any], names: frozenset[str] | None) -> Mapping[str, Any]:
    if names is None:
        return inputs
    return {name: value for name, value in inputs.items() if name in names}


def _keyword_names(function: Callable[..., Any], taken: int) -> frozenset[str] | None:
    """Names that a function takes by keyword, without the first ``taken``; None for any name."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(p.name for p in parameters[taken:] if p.kind in by_keyword)
