"""The plan that a module declares itself, as models of Hugging Face do."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from trainwright.sharding.errors import NotAvailableError, ShardingError
from trainwright.sharding.tensor.plan import names_matching
from trainwright.sharding.tensor.styles import Column, HeadNorm, Row, Style, Vocab

_STYLES: Mapping[str, Callable[[int], Style]] = {
    "colwise": lambda unit: Column(unit=unit),
    "colwise_gather_output": lambda unit: Column(gather_output=True),
    "colwise_rep": lambda unit: Column(gather_output=True),
    "packed_colwise": lambda unit: Column(blocks=2),
    "rowwise": lambda unit: Row(unit=unit),
    "rowwise_split_input": lambda unit: Row(input_is_whole=True),
    "rowwise_rep": lambda unit: Row(input_is_whole=True),
    "embedding_rowwise": lambda unit: Vocab(),
    "replicated_with_grad_allreduce": lambda unit: HeadNorm(),
}


def plan_of(module: nn.Module) -> dict[str, Style]:
    """Return the plan that a module declares in ``_tp_plan`` or ``config.base_model_tp_plan``.

    It cuts into equal parts, of whole heads where the module around a layer has a ``head_dim``, and
    sums the gradient of each layer's input by itself. The plans that ship, such as `llama_plan`,
    also cut sequences, share key/value heads between ranks, and sum once for several layers.
    Entries that match no module are left out: a declared plan serves a family of models.

    Args:
        module: The model; nothing is changed.

    Raises:
        ShardingError: The module declares no plan, or none of it matches.
        NotAvailableError: It declares a style that there is not.
    """
    plan: dict[str, Style] = {}
    for pattern, said in _declared(module).items():
        found = names_matching(module, pattern)
        if not found:
            continue
        if said not in _STYLES:
            raise NotAvailableError(
                f"{type(module).__name__} declares {said!r} for {pattern!r}, which has no style "
                f"yet; there are styles for {', '.join(_STYLES)}: write the plan by hand"
            )
        plan[pattern] = _STYLES[said](_unit(module, found[0]))
    if not plan:
        raise ShardingError(f"no pattern that {type(module).__name__} declares matches a module")
    return plan


def _declared(module: nn.Module) -> dict[str, str]:
    own = getattr(module, "_tp_plan", None)
    if own:
        return dict(own)
    base = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
    if not base:
        raise ShardingError(
            f"{type(module).__name__} declares no plan: it has no _tp_plan and its config no "
            "base_model_tp_plan; write one, or use one that ships, such as gpt2_plan()"
        )
    prefix = getattr(module, "base_model_prefix", "")
    inside = f"{prefix}." if prefix and hasattr(module, prefix) else ""
    return {f"{inside}{pattern}": said for pattern, said in base.items()}


def _unit(module: nn.Module, name: str) -> int:
    """Return the size of a head where a layer belongs to attention, else 1."""
    around = module.get_submodule(name.rpartition(".")[0])
    head_dim = getattr(around, "head_dim", 1)
    return head_dim if isinstance(head_dim, int) else 1
