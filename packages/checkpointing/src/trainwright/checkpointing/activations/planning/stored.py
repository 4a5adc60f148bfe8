"""Plans and costs as JSON, checked like any value when they are read."""

from __future__ import annotations

import json
from typing import Any

import attrs

from trainwright.checkpointing.errors import PlanError

from .choices import Choice, Compress, Offload, Partial
from .costs import ChainCosts, Costs, LayerCost, OperatorCost, OperatorCosts
from .plan import ChainPlan, Claims, Item, Kept, OperatorDecision, OperatorPlan, Plan, Region

_CHOICES: dict[str, type[Choice]] = {"offload": Offload, "compress": Compress}


def plan_to_json(plan: Plan) -> str:
    """Return the plan with its claims as one line of JSON."""
    data: dict[str, Any] = {"claims": attrs.asdict(plan.claims) if plan.claims else None}
    if isinstance(plan, ChainPlan):
        data |= {"kind": "chain", "items": [_item_data(item) for item in plan.items]}
    else:
        decisions = [[each.name, each.action, each.store] for each in plan.decisions]
        data |= {"kind": "operators", "decisions": decisions}
    return json.dumps(data, sort_keys=True)


def plan_from_json(text: str) -> Plan:
    """Return the plan that `plan_to_json` wrote.

    Raises:
        PlanError: The text is no plan, or not a valid one.
    """
    with _Reading("plan"):
        data = json.loads(text)
        claims = None if data["claims"] is None else Claims(**data["claims"])
        if data["kind"] == "chain":
            return ChainPlan([_item(each) for each in data["items"]], claims=claims)
        if data["kind"] == "operators":
            decisions = [OperatorDecision(*each) for each in data["decisions"]]
            return OperatorPlan(decisions, claims=claims)
    raise PlanError(f"a plan's kind must be chain or operators, got {data['kind']!r}")


def costs_to_json(costs: Costs) -> str:
    """Return costs as one line of JSON."""
    choices = [_choice_data(choice) for choice in costs.choices]
    if isinstance(costs, ChainCosts):
        layers = [attrs.asdict(layer) for layer in costs.layers]
        data = {"kind": "chain", "input_bytes": costs.input_bytes, "layers": layers}
    else:
        operators = [attrs.asdict(operator) for operator in costs.operators]
        data = {"kind": "operators", "operators": operators}
    return json.dumps(data | {"choices": choices}, sort_keys=True)


def costs_from_json(text: str) -> Costs:
    """Return the costs that `costs_to_json` wrote.

    Raises:
        PlanError: The text holds no costs, or not valid ones.
    """
    with _Reading("costs"):
        data = json.loads(text)
        choices = [_choice(each) for each in data["choices"]]
        if data["kind"] == "chain":
            layers = [_layer(each) for each in data["layers"]]
            return ChainCosts(layers, data["input_bytes"], choices)
        if data["kind"] == "operators":
            return OperatorCosts([OperatorCost(**each) for each in data["operators"]], choices)
    raise PlanError(f"the kind of costs must be chain or operators, got {data['kind']!r}")


class _Reading:
    """Turns what reading malformed data raises into this package's error."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        expected = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
        if isinstance(error, expected) and not isinstance(error, PlanError):
            raise PlanError(
                f"this is no {self._what} as JSON: {type(error).__name__}: {error}"
            ) from error


def _item_data(item: Item) -> Any:
    if isinstance(item, Kept):
        return [item.layer, item.store]
    return [[_item_data(inner) for inner in item.items], item.store]


def _item(data: Any) -> Item:
    what, store = data
    if isinstance(what, list):
        return Region([_item(inner) for inner in what], store)
    return Kept(what, store)


def _choice_data(choice: Choice) -> dict[str, Any]:
    kind = next(name for name, cls in _CHOICES.items() if isinstance(choice, cls))
    names = [field.name for field in attrs.fields(type(choice)) if field.init]
    return {"kind": kind} | {name: getattr(choice, name) for name in names}


def _choice(data: dict[str, Any]) -> Choice:
    return _CHOICES[data["kind"]](**{k: v for k, v in data.items() if k != "kind"})


def _layer(data: dict[str, Any]) -> LayerCost:
    partials = [Partial(**each) for each in data["partials"]]
    return LayerCost(**(data | {"partials": partials}))
