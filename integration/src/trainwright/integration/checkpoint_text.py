"""What the checkpoint commands print."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from trainwright.checkpointing.exchange import Imported
from trainwright.checkpointing.state.comparing import Contents, Differences
from trainwright.checkpointing.state.inspection import list_checkpoints


@attrs.frozen(eq=False)
class Opened:
    """An open checkpoint of any format.

    Args:
        kind: The format.
        contents: Tensors and plain values by path.
        described: What ``show --json`` prints.
        step: Its step, where the format has one.
        run: Its run, where the format has one.
        refused: Values of it that cannot be read, with the reasons.
        changed: Paths of values that had tuples, which are lists now.
    """

    kind: str
    contents: Contents
    described: dict[str, Any]
    step: int | None = None
    run: str | None = None
    refused: dict[str, str] = attrs.Factory(dict)
    changed: tuple[str, ...] = ()


def describe_foreign(kind: str, place: Path, found: Imported) -> dict[str, Any]:
    """Return what a foreign folder holds as plain values that JSON can hold."""
    tensors = {
        name: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "pieces": [
                {"boxes": [[list(piece.box.start), list(piece.box.stop)]]}
                for piece in getattr(tensor, "pieces", ())
            ],
        }
        for name, tensor in found.contents.tensors.items()
    }
    return {
        "folder": str(place),
        "format": kind,
        "tensors": tensors,
        "plain": found.contents.plain,
        "refused": found.refused,
    }


def lines_of(opened: Opened) -> Iterable[str]:
    """Yield the lines that say what a checkpoint holds."""
    said = opened.described
    yield said["folder"]
    if opened.kind == "trainwright":
        complete, broken = list_checkpoints(Path(said["folder"]).parent, opened.run)
        steps = ", ".join(str(saved.manifest.step) for saved in complete)
        yield f"step {opened.step} of run {opened.run}; complete here: {steps}"
        yield from (f"broken: {folder.name}: {reason}" for folder, reason in broken)
        yield f"files: {', '.join(said['files']) or 'none'}"
    else:
        yield f"format: {opened.kind}"
    for path, value in opened.contents.plain.items():
        yield f"  {path} = {_short(value)}"
    for path, reason in opened.refused.items():
        yield f"  {path}: {reason}"
    width = max((len(path) for path in opened.contents.tensors), default=0)
    for path, tensor in said["tensors"].items():
        shape = "x".join(map(str, tensor["shape"])) or "scalar"
        pieces = len(tensor["pieces"])
        plural = "" if pieces == 1 else "s"
        yield f"  {path:<{width}}  {tensor['dtype']:<10} {shape:<16} {pieces} piece{plural}"


def lines_of_differences(found: Differences) -> Iterable[str]:
    """Yield the lines that say how two checkpoints differ."""
    yield from (f"only in the first: {path}" for path in found.missing)
    yield from (f"only in the second: {path}" for path in found.extra)
    for path, a, b in found.plain:
        yield f"{path}: {_short(a)} and {_short(b)}"
    for path, how in found.tensors:
        if how.kinds is not None:
            yield f"{path}: {how.kinds[0]} and {how.kinds[1]}"
        else:
            yield f"{path}: {how.count} elements differ, at most by {how.largest:.6g}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + " ..."


def size_text(num_bytes: int) -> str:
    """Return a number of bytes as people read it."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"


def finite(value: Any) -> Any:
    """Return ``value`` with infinities and NaNs, which JSON has not, as strings."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
