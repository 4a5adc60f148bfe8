"""What optimizers keep of parameters, by name: for checkpoints of any layout and for snapshots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from trainwright.checkpointing.state import Sharded
from trainwright.collectives import ShardSpec
from trainwright.integration.errors import ConfigError
from trainwright.integration.optimizers.joined import JoinedOptimizer, Member
from trainwright.integration.optimizers.lion import Lion
from trainwright.sharding.data import WholeMatrices

CLOCK = "step"
"""How optimizers of ``torch.optim`` call the number of updates so far."""

BEGINS_AT_ZERO = (
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.Muon,
    torch.optim.Adafactor,
    Lion,
)
"""Optimizers all of whose states are zeros before their first update."""

OPTION = "group."
"""Begins the names of options in which some optimizers count."""


@attrs.frozen(eq=False)
class Held:
    """What an optimizer keeps of a parameter, or of one whole matrix, on this rank.

    Args:
        name: the parameter's; of a matrix of a stack with its place in it.
        spec: which elements those of a state of the parameter's shape are.
        parameter: what it is kept under.
        optimizer: keeps it.
        member: to which the optimizer belongs.
        is_whole: whether it is kept whole, so that states may have any shape.
    """

    name: str
    spec: ShardSpec
    parameter: nn.Parameter
    optimizer: torch.optim.Optimizer
    member: Member
    is_whole: bool

    @property
    def values(self) -> dict[str, Any]:
        """What is kept now; empty before the first update."""
        found: dict[str, Any] = self.optimizer.state.get(self.parameter, {})
        return found

    @property
    def group(self) -> dict[str, Any]:
        """The options of the parameter."""
        return next(
            group
            for group in self.optimizer.param_groups
            if any(parameter is self.parameter for parameter in group["params"])
        )

    def put(self, values: Mapping[str, Any]) -> None:
        """Let the optimizer keep these from now on."""
        if values:
            self.optimizer.state[self.parameter] = dict(values)
        else:
            self.optimizer.state.pop(self.parameter, None)

    @property
    def counts_updates(self) -> bool:
        """Whether its "step" is the number of updates, and its options stay as they were given."""
        kind = type(self.optimizer)
        return kind is Lion or f"{kind.__module__}.".startswith("torch.optim.")

    @property
    def counters(self) -> dict[str, float]:
        """The numbers among the options of an optimizer that may count in them."""
        if self.counts_updates:
            return {}
        return {
            key: value
            for key, value in self.group.items()
            if type(value) in (int, float) and key not in ("lr", "initial_lr", "weight_decay")
        }


def held(optimizer: JoinedOptimizer) -> dict[str, Held]:
    """Return what is kept on this rank by the name of the parameter or matrix."""
    found: dict[str, Held] = {}
    for member in optimizer.members:
        inner = member.optimizer
        if isinstance(inner, WholeMatrices):
            specs = inner.owned
            for label, (part, own) in inner.inner.items():
                spec = ShardSpec.full(label, part.shape, specs[label].replicated)
                found[label] = Held(label, spec, part, own, member, is_whole=True)
            continue
        for name, piece in member.pieces.items():
            found[name] = Held(name, piece.spec, piece.parameter, inner, member, is_whole=False)
    return found


def tree(optimizer: JoinedOptimizer) -> dict[str, dict[str, Any]]:
    """Return what this rank writes of the states into a checkpoint; tensors are the live ones.

    Raises:
        ConfigError: an optimizer that updates pieces keeps what is neither a number nor of the
            piece's shape.
    """
    found: dict[str, dict[str, Any]] = {}
    for each in held(optimizer).values():
        found[each.name] = {leaf.key: leaf.sharded for leaf in _leaves(each) if leaf.is_written}
    return found


class Filling:
    """States of an optimizer that a checkpoint is about to fill.

    Args:
        optimizer: whose.
        updates: how many it had made; before the first there may be nothing to fill.
    """

    def __init__(self, optimizer: JoinedOptimizer, updates: int) -> None:
        self._held = held(optimizer)
        self._updates = updates
        for each in self._held.values():
            materialise(each, updates)
            optimizer.take_in(each.parameter)
        self._leaves = {name: list(_leaves(each)) for name, each in self._held.items()}

    @property
    def tree(self) -> dict[str, dict[str, Any]]:
        """What is to be filled; every rank that keeps some of a parameter takes its numbers."""
        return {
            name: {leaf.key: leaf.sharded for leaf in leaves}
            for name, leaves in self._leaves.items()
        }

    def finish(self) -> None:
        """Give the optimizer the numbers that are no tensors, and the number of its updates."""
        for name, leaves in self._leaves.items():
            each = self._held[name]
            for leaf in leaves:
                _take_number(each, leaf)
            if each.counts_updates and CLOCK in each.values:
                _set_clock(each.values, self._updates)


def materialise(each: Held, updates: int) -> None:
    """Give an optimizer the states that its first update would make, without an update.

    What these hold is of no account where ``updates`` have been made and are about to be loaded.
    Before the first one they are what it begins with, zeros, or stay away where that is not known.
    """
    if each.values or (updates == 0 and type(each.optimizer) not in BEGINS_AT_ZERO):
        return
    values = _after_nothing(each) if each.is_whole else _like_a_sample(each)
    if values and CLOCK in values and each.counts_updates:
        _set_clock(values, updates)
    each.put(values)


def snapshot(optimizer: JoinedOptimizer) -> dict[str, Any]:
    """Return all that is kept on this rank; tensors are the live ones."""
    return {
        name: {"values": dict(each.values), "counters": each.counters}
        for name, each in held(optimizer).items()
    }


@torch.no_grad()
def put_back(optimizer: JoinedOptimizer, kept: Mapping[str, Any]) -> None:
    """Let an optimizer go on from a `snapshot`, in the tensors that it has."""
    for name, each in held(optimizer).items():
        now = each.values
        values = kept[name]["values"]
        for key, value in values.items():
            if isinstance(now.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                now[key].copy_(value)
            else:
                now[key] = value
        for key in [key for key in now if key not in values]:
            del now[key]
        each.put(now)
        each.group.update(kept[name]["counters"])


@attrs.frozen(eq=False)
class _Leaf:
    """One thing that is kept, as a checkpoint has it; ``is_written``: this rank may write it."""

    key: str
    tensor: torch.Tensor
    spec: ShardSpec
    is_written: bool = True

    @property
    def sharded(self) -> Sharded:
        return Sharded(self.tensor, self.spec)


def _leaves(each: Held) -> Iterator[_Leaf]:
    for key, value in each.values.items():
        if value is None or (key == CLOCK and each.counts_updates):
            continue
        if isinstance(value, torch.Tensor) and value.shape == each.parameter.shape:
            yield _Leaf(key, value, each.spec)
        elif isinstance(value, bool | int | float) or _is_number(value):
            yield _number(each, key, value)
        elif each.is_whole and isinstance(value, torch.Tensor):
            own = ShardSpec.full(f"{each.name} {key}", value.shape, each.spec.replicated)
            yield _Leaf(key, value, own)
        else:
            what = f"a tensor of {tuple(value.shape)}" if isinstance(value, torch.Tensor) else value
            raise ConfigError(
                f"{type(each.optimizer).__name__} keeps {key!r}, {what}, of a piece of {each.name} "
                f"of {tuple(each.parameter.shape)}: that is not element-wise, or cannot be saved; "
                "plan it with optimizers.whole_parameters(factory)"
            )
    for option, value in each.counters.items():
        yield _number(each, f"{OPTION}{option}", value)


def _is_number(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _number(each: Held, key: str, value: torch.Tensor | float) -> _Leaf:
    tensor = value if isinstance(value, torch.Tensor) else _as_tensor(value)
    spec = ShardSpec.full(f"{each.name} {key}", (), each.spec.replicated)
    # Ranks that keep other elements of the parameter have the same number; one writes it.
    return _Leaf(key, tensor, spec, each.is_whole or _has_the_first(each.spec))


def _as_tensor(value: float) -> torch.Tensor:
    dtypes = {bool: torch.bool, int: torch.int64}
    return torch.tensor(value, dtype=dtypes.get(type(value), torch.float64))


def _has_the_first(spec: ShardSpec) -> bool:
    return any(not any(box.start) for _, box in spec.parts())


def _take_number(each: Held, leaf: _Leaf) -> None:
    if leaf.key.startswith(OPTION):
        option = leaf.key.removeprefix(OPTION)
        each.group[option] = type(each.group[option])(leaf.tensor.item())
    elif not isinstance(each.values[leaf.key], torch.Tensor):
        each.values[leaf.key] = type(each.values[leaf.key])(leaf.tensor.item())


def _set_clock(values: dict[str, Any], updates: int) -> None:
    if isinstance(values[CLOCK], torch.Tensor):
        values[CLOCK].fill_(updates)
    else:
        values[CLOCK] = type(values[CLOCK])(updates)


def _after_nothing(each: Held) -> dict[str, Any]:
    """Return what the optimizer of a whole matrix keeps after a step of zeros from zero."""
    part, stand_in = each.parameter, each.parameter.data
    part.data = stand_in.new_zeros(part.shape)
    part.grad = torch.zeros_like(part)
    each.optimizer.step()
    part.data = stand_in
    part.grad = None
    return dict(each.values)


def _like_a_sample(each: Held) -> dict[str, Any]:
    """Return what the optimizer of pieces would keep of one, seen from a small parameter."""
    assert each.member.factory is not None
    like = each.parameter
    sample = nn.Parameter(like.new_zeros((3,) * like.dim()))
    sample.grad = torch.zeros_like(sample)
    twin = each.member.factory([{"params": [("sample", sample)], "weight_decay": 0.0}])
    twin.step()
    return {
        key: torch.zeros_like(like, dtype=value.dtype)
        if isinstance(value, torch.Tensor) and value.shape == sample.shape
        else value
        for key, value in twin.state[sample].items()
    }
