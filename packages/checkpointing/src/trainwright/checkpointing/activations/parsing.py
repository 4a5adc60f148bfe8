"""Policies by their names, as command lines give them."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Unpack

from trainwright.checkpointing.errors import PolicyError
from trainwright.checkpointing.protocol import Keeper, LayerRunner

from .budget import Agree, within_budget
from .compress import Compress, codec_named
from .holding import hold_by
from .offload import offload_to_cpu
from .offload_file import offload_to_folder
from .policy import RecomputeOptions, keep_all, recompute_all, recompute_every, recompute_sqrt
from .selective import selective

_NAMES = ("none", "full", "every-4", "sqrt", "selective", "budget:1GiB")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def parse_policy(
    text: str, *, agree: Agree | None = None, **options: Unpack[RecomputeOptions]
) -> LayerRunner:
    """Return the policy that ``text`` names.

    Args:
        text: ``none``, ``full``, ``every-K``, ``sqrt``, ``selective`` or ``budget:BYTES``, where
            BYTES is a number, or one with a unit such as ``512MiB`` or ``2GB``.
        agree: For a budget, makes what ranks count the same on all, as in `WithinBudget`.
        options: As in `Recomputed`.

    Raises:
        PolicyError: There is no such policy.
    """
    every = re.fullmatch(r"every-(\d{1,9})", text, re.ASCII)
    if every:
        return recompute_every(int(every[1]), **options)
    if text == "none":
        return keep_all()
    if text == "full":
        return recompute_all(**options)
    if text == "sqrt":
        return recompute_sqrt(**options)
    if text == "selective":
        return selective(**options)
    budget = re.fullmatch(r"budget:(\d{1,15})(?:([KMG]i?)?B)?", text, re.ASCII)
    if budget:
        return within_budget(int(budget[1]) * _UNITS[budget[2] or ""], agree=agree, **options)
    near = difflib.get_close_matches(text, _NAMES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise PolicyError(
        "recomputation must be none, full, every-K (K >= 1), sqrt, selective or budget:BYTES, "
        f"got {text!r}{hint}"
    )


def parse_keeper(offload: str | None = None, compress: str | None = None) -> Keeper | None:
    """Return the keeper that options name: compressed first, then offloaded; None for neither.

    Args:
        offload: ``cpu``, or a folder that exists.
        compress: ``int8``, ``fp8`` or ``bf16``.

    Raises:
        PolicyError: There is no such folder or codec.
    """
    keeper: Keeper | None = None
    if offload is not None:
        if not offload:
            raise PolicyError("offloading needs 'cpu' or a folder, got ''")
        keeper = offload_to_cpu() if offload == "cpu" else offload_to_folder(Path(offload))
    if compress is not None:
        keeper = Compress(codec_named(compress), then=keeper)
    return keeper


def compose(
    policy: LayerRunner, *, offload: str | None = None, compress: str | None = None
) -> LayerRunner:
    """Return ``policy``, with what it keeps compressed and offloaded as `parse_keeper` says.

    With compression gradients are those of decoded values, within the codec's bound of what was
    kept, and not bitwise those of ``policy``.
    """
    keeper = parse_keeper(offload, compress)
    return policy if keeper is None else hold_by(policy, keeper)
