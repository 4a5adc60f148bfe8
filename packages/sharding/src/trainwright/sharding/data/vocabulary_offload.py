"""DeepSpeed's offload blocks, as a place for states and weights."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from trainwright.sharding.errors import NotAvailableError, ShardingError
from trainwright.sharding.offload import Offload, offload_to_folder, offload_to_host

OFFLOAD_BLOCKS = ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param")
"""The keys of ``zero_optimization`` that say what does not stay on the device."""

_WINDOW = "three units are in memory: one read, one updated, one written"
_IGNORED: Mapping[str, str] = {
    "pin_memory": "host memory is pinned where a device reads and writes it",
    "buffer_count": _WINDOW,
    "buffer_size": _WINDOW,
    "max_in_cpu": _WINDOW,
    "pipeline_read": _WINDOW,
    "pipeline_write": _WINDOW,
    "fast_init": "states are made in the first update",
    "cpuadam_cores_perc": "PyTorch's optimizer updates on PyTorch's threads",
}
_REFUSED: Mapping[str, tuple[Any, str]] = {
    "ratio": (1, "all states are offloaded, or none"),
    "super_offload": (False, "an update begins once the norm is known"),
}


@attrs.frozen
class AskedOffload:
    """What offload blocks ask for.

    Args:
        states: Where the optimizer's weights and states are kept.
        weights: Whether weights are kept there too between uses.
        folder: Of the file.
        notes: What has no effect, or goes further than was asked, and why.
    """

    states: Literal["device", "host", "file"] = "device"
    weights: bool = False
    folder: str | None = None
    notes: tuple[str, ...] = ()

    def make(self) -> Offload | None:
        """Return a rank's own, for `data_parallel`; None where all stays on the device.

        Raises:
            OffloadError: The folder is none, or cannot be written to.
        """
        if self.states == "host":
            return offload_to_host(weights=self.weights)
        if self.states == "file":
            assert self.folder is not None
            return offload_to_folder(self.folder, weights=self.weights)
        return None


def offload_from_deepspeed(given: Mapping[str, Any], stage: int) -> AskedOffload:
    """Read the blocks ``offload_optimizer`` and ``offload_param``, and their old names.

    Args:
        given: The block ``zero_optimization``; its other keys are not looked at.
        stage: Its stage.

    Raises:
        ShardingError: A key is unknown, or a value is no value of its key.
        NotAvailableError: A key asks for what this package does not have.
    """
    notes: list[str] = []
    states, state_folder = _read("offload_optimizer", "cpu_offload", given, notes)
    weights, weight_folder = _read("offload_param", "cpu_offload_param", given, notes)
    if weights != "none" and stage < 3:
        notes.append(f"offload_param has no effect at stage {stage}, where weights are in use")
        weights = "none"
    if "none" == states == weights:
        return AskedOffload(notes=tuple(notes))
    if states == "none":
        notes.append("offload_param takes the optimizer's states with it")
    if "nvme" in (states, weights):
        if stage == 3 and states != weights:
            notes.append("at stage 3 states and weights are in the file together")
        folders = {folder for folder in (state_folder, weight_folder) if folder is not None}
        if len(folders) > 1:
            raise NotAvailableError(
                f"offload_optimizer to {state_folder!r} and offload_param to {weight_folder!r} are "
                "two folders, and states and weights are in one file; name one"
            )
        return AskedOffload("file", stage == 3, folders.pop(), tuple(notes))
    return AskedOffload("host", weights == "cpu", None, tuple(notes))


def _read(key: str, old: str, given: Mapping[str, Any], notes: list[str]) -> tuple[str, str | None]:
    """Return a device, and the folder of a file."""
    block = given.get(key)
    flag = given.get(old)
    if flag is not None and not isinstance(flag, bool):
        raise ShardingError(f"{old} must be true or false, got {flag!r}")
    if flag:
        if block is not None:
            raise ShardingError(f"{old} is an old name of {key}; keep one")
        block = {"device": "cpu"}
    if block is None:
        return "none", None
    if not isinstance(block, Mapping):
        raise ShardingError(f"{key} must be a block such as {{'device': 'cpu'}}, got {block!r}")
    device = "none" if block.get("device") is None else block["device"]
    if device not in ("none", "cpu", "nvme"):
        raise ShardingError(f"{key}.device must be none, cpu or nvme, got {device!r}")
    for name, value in block.items():
        _check(key, name, value, device, notes)
    folder = block.get("nvme_path")
    if device != "nvme":
        return device, None
    if not isinstance(folder, str) or not folder:
        raise ShardingError(f"{key} to nvme needs nvme_path, a folder, got {folder!r}")
    return device, folder


def _check(key: str, name: str, value: Any, device: str, notes: list[str]) -> None:
    known = ("device", "nvme_path", *_IGNORED, *_REFUSED)
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ShardingError(f"{key} has no setting {name!r}{hint}")
    if value is None or name == "device":
        return
    if device == "none" or (name == "nvme_path" and device != "nvme"):
        notes.append(f"{key}.{name} has no effect: the device is {device}")
    elif name in _IGNORED:
        notes.append(f"{key}.{name} is ignored: {_IGNORED[name]}")
    elif name in _REFUSED and value != _REFUSED[name][0]:
        raise NotAvailableError(f"{key}.{name}={value} is not available: {_REFUSED[name][1]}")
