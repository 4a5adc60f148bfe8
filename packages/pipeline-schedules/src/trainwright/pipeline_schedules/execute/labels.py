"""How messages name a parameter: by stage and module."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


def module_labels(stages: Mapping[int, nn.Module]) -> dict[nn.Parameter, str]:
    """For each parameter, the first module that holds it: ``stage 1 blocks.3.norm``."""
    labels: dict[nn.Parameter, str] = {}
    for stage, root in stages.items():
        for name, parameter in root.named_parameters():
            module = name.rpartition(".")[0]
            labels.setdefault(parameter, f"stage {stage} {module}".rstrip())
    return labels
