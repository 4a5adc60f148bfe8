"""Published checkpoints name each expert's matrices; the layer holds them in stacks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch

from trainwright.sharding.errors import ShardingError

_OF_AN_EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_ROLES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_SHARED = re.compile(r"\bshared_experts\.")


class ExpertNames(NamedTuple):
    """What a family of checkpoints calls the matrices of an expert."""

    gate: str
    up: str
    down: str


QWEN_NAMES = ExpertNames("gate_proj", "up_proj", "down_proj")
"""Of Qwen's and DeepSeek's."""

MIXTRAL_NAMES = ExpertNames("w1", "w3", "w2")
"""Of Mixtral's."""


def stack_experts(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state dict in which the matrices of experts lie in stacks, as in the layer.

    ``x.experts.3.up_proj.weight`` goes to ``x.experts.gate_up_proj`` and so on; DeepSeek's
    ``shared_experts`` become ``shared_expert``; all else keeps its name, and stacks that are there
    already stay.

    Args:
        state: Whole tensors by name, as published for Mixtral, Qwen or DeepSeek.

    Raises:
        ShardingError: An expert is missing, or one of its matrices.
    """
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name, tensor in state.items():
        match = _OF_AN_EXPERT.fullmatch(name)
        if match is None:
            found[_SHARED.sub("shared_expert.", name)] = tensor
            continue
        prefix, number, matrix = match.groups()
        experts.setdefault(prefix, {})[int(number), _ROLES.get(matrix, matrix)] = tensor
    for prefix, matrices in experts.items():
        wanted = [
            (number, role)
            for number in range(1 + max(number for number, _ in matrices))
            for role in QWEN_NAMES
        ]
        missing = [f"{number}.{role}" for number, role in wanted if (number, role) not in matrices]
        if missing:
            raise ShardingError(f"{prefix} has no {', '.join(missing)}; load all shards together")
        joined = [matrices[at] for at in wanted]
        found[f"{prefix}.gate_up_proj"] = torch.stack(
            [torch.cat([gate, up]) for gate, up in zip(joined[::3], joined[1::3], strict=True)]
        )
        found[f"{prefix}.down_proj"] = torch.stack(joined[2::3])
    return found


def unstack_experts(
    state: Mapping[str, torch.Tensor], names: ExpertNames = QWEN_NAMES
) -> dict[str, torch.Tensor]:
    """Return a state dict with a name for each matrix of each expert: views of the stacks.

    Args:
        state: Whole tensors by name, as the layer has them.
        names: What the matrices are to be called.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        prefix, _, last = name.rpartition(".")
        if last not in ("gate_up_proj", "down_proj") or not f".{prefix}".endswith(".experts"):
            found[name] = tensor
            continue
        for number, matrix in enumerate(tensor.unbind(0)):
            if last == "down_proj":
                found[f"{prefix}.{number}.{names.down}.weight"] = matrix
                continue
            gate, up = matrix.chunk(2)
            found[f"{prefix}.{number}.{names.gate}.weight"] = gate
            found[f"{prefix}.{number}.{names.up}.weight"] = up
    return found
