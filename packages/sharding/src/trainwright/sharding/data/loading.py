"""Loads the plain model's state, from one rank or from every rank's own copy."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from trainwright.collectives import Communicator, ReduceOp, ShardSpec
from trainwright.sharding.data.agreement import agree, all_gather_json, broadcast_json
from trainwright.sharding.data.errors import LifecycleError
from trainwright.sharding.data.held import HeldTensor, agreed_tensors
from trainwright.sharding.data.lifecycle import DataParallel
from trainwright.sharding.data.overlaps import copy_shared
from trainwright.sharding.data.state_dict import BLOCK_BYTES, check_transfer

_SHOWN = 3


def load_full(
    parallel: DataParallel,
    state: Mapping[str, torch.Tensor] | None,
    *,
    root: int | None = 0,
    block_bytes: int = BLOCK_BYTES,
) -> None:
    """Set masters, weights, frozen parameters and buffers from a plain model's ``state_dict``.

    Call it between two steps, on all ranks. Values are converted to the dtype of what they are
    copied to. Of a tied tensor one name is enough.

    Args:
        parallel: The model, of any stage and layout.
        state: The plain model's tensors by name, exactly those; on other ranks than ``root`` it is
            not looked at. Tensors on the CPU may be mapped from a file: they are read once, and
            where ``root`` is None only the elements that the rank keeps.
        root: The rank of the world that has it; None where every rank has it.
        block_bytes: At most this much is under way at once.

    Raises:
        ShardingError: On all ranks alike and before anything is changed: a name is missing, no
            rank knows a name, a shape or kind of dtype differs, tied names have different values,
            ranks have different states, or `DataParallel.publish` would refuse now.

    Communicates:
        What the state holds (names and shapes) and the agreement on it. With ``root`` one broadcast
        of each tensor over the world, block by block. Then `DataParallel.publish`.
    """
    world = parallel.mesh.world
    check_transfer(world, root, block_bytes)
    held = agreed_tensors(parallel)
    content = _agree_on_content(world, state, root)
    sources, problem = _match(held, content)
    problem = _unready(parallel) or problem
    if state is not None and root in (None, world.rank) and problem is None:
        problem = _check_ties(held, state)
    wanted = _agree_on_names(world, content, held, sources, problem)
    with torch.no_grad():
        if root is None:
            assert state is not None
            for item in held:
                values = item.spec.extract(state[sources[item.name]]).reshape(-1)
                _write(item, values, item.spec)
        else:
            sender = _Sender(world, root, state if world.rank == root else None, block_bytes)
            by_source = {sources[item.name]: item for item in held}
            for name in wanted:
                sender.send(name, content[name], by_source.get(name))
    parallel.publish()


def _unready(parallel: DataParallel) -> str | None:
    """Return why `DataParallel.publish` would refuse at the end."""
    try:
        parallel._check_publishable()
    except LifecycleError as error:
        return str(error)
    return None


@attrs.frozen
class _Content:
    """What a state says of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _agree_on_content(
    world: Communicator, state: Mapping[str, torch.Tensor] | None, root: int | None
) -> dict[str, _Content]:
    mine: Any = _describe(state) if root in (None, world.rank) else None
    if root is not None:
        mine = broadcast_json(world, mine, root)
    agree(world, mine if isinstance(mine, str) else None)
    if root is None:
        digest = hashlib.blake2b(repr(mine).encode(), digest_size=16).hexdigest()
        if len(set(all_gather_json(world, digest))) > 1:
            agree(world, "with root=None all ranks must have states of equal names and shapes")
    return {
        name: _Content(tuple(shape), getattr(torch, dtype)) for name, (shape, dtype) in mine.items()
    }


def _describe(state: object) -> Any:
    """Return shapes and dtypes by name, or the text of what is wrong with a state."""
    if not isinstance(state, Mapping):
        return f"the state to load is a {type(state).__name__}; pass a dict of tensors by name"
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            return f"{name!r} in the state is a {type(tensor).__name__}, not a tensor"
    return {
        name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
        for name, tensor in state.items()
    }


def _match(
    held: list[HeldTensor], content: Mapping[str, _Content]
) -> tuple[dict[str, str], str | None]:
    """Return the name in the state of each tensor, by its own name, and what does not fit."""
    sources: dict[str, str] = {}
    missing: list[str] = []
    for item in held:
        present = [name for name in item.names if name in content]
        if not present:
            missing.append(item.name)
            continue
        sources[item.name] = present[0]
        for name in present:
            if content[name].shape != item.spec.global_shape:
                return sources, (
                    f"{name} has shape {item.spec.global_shape} in the model and "
                    f"{content[name].shape} in the state"
                )
            if content[name].dtype.is_floating_point != item.dtype.is_floating_point:
                return sources, (
                    f"{name} is {item.dtype} in the model and {content[name].dtype} in the state"
                )
    if missing:
        return sources, f"the state lacks {_listed(missing, content)}"
    return sources, None


def _check_ties(held: list[HeldTensor], state: Mapping[str, torch.Tensor]) -> str | None:
    for item in held:
        first, *others = [name for name in item.names if name in state]
        for name in others:
            if not _is_same(state[name], state[first]) and not torch.equal(
                state[name], state[first]
            ):
                return (
                    f"{first} and {name} are one parameter in the model but have different values "
                    "in the state; leave one of them out"
                )
    return None


def _is_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    # Where both are mapped from a file this saves reading them.
    return tensor.data_ptr() == other.data_ptr() and tensor.stride() == other.stride()


def _agree_on_names(
    world: Communicator,
    content: Mapping[str, _Content],
    held: list[HeldTensor],
    sources: Mapping[str, str],
    problem: str | None,
) -> list[str]:
    """Return the names in the state that some rank reads."""
    known = {name for item in held for name in item.names}
    read = set(sources.values())
    marks = torch.tensor(
        [[name in known for name in content], [name in read for name in content]],
        dtype=torch.int64,
        device=world.device,
    ).view(2, len(content))
    world.all_reduce(marks, ReduceOp.MAX).wait()
    is_known, is_read = marks.tolist()
    unknown = [name for name, mark in zip(content, is_known, strict=True) if not mark]
    if problem is None and unknown:
        problem = f"the model does not have {_listed(unknown, known)}, which the state holds"
    agree(world, problem)
    return [name for name, mark in zip(content, is_read, strict=True) if mark]


@attrs.frozen(eq=False)
class _Sender:
    """Broadcasts the tensors of root's state, block by block."""

    world: Communicator
    root: int
    state: Mapping[str, torch.Tensor] | None
    block_bytes: int

    def send(self, name: str, content: _Content, item: HeldTensor | None) -> None:
        """Send one tensor; ranks that hold part of it write that."""
        whole = ShardSpec.full(name, content.shape)
        flat = None if self.state is None else self.state[name].detach().reshape(-1)
        step = max(self.block_bytes // content.dtype.itemsize, 1)
        for start in range(0, whole.numel, step):
            stop = min(start + step, whole.numel)
            if flat is not None:
                block = flat[start:stop].contiguous().to(self.world.device)
            else:
                block = torch.empty(stop - start, dtype=content.dtype, device=self.world.device)
            self.world.broadcast(block.view(torch.uint8), self.root).wait()
            if item is not None:
                _write(item, block, whole.narrow(start, stop))


def _write(item: HeldTensor, values: torch.Tensor, spec: ShardSpec) -> None:
    if item.tensor.is_contiguous():
        copy_shared(values, spec, item.tensor.view(-1), item.spec)
        return
    flat = item.tensor.reshape(-1)
    copy_shared(values, spec, flat, item.spec)
    item.tensor.copy_(flat.view(item.tensor.shape))


def _listed(names: list[str], known: Mapping[str, object] | set[str]) -> str:
    shown = []
    for name in names[:_SHOWN]:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
        shown.append(f"{name} (near: {near[0]})" if near else name)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(shown) + more
