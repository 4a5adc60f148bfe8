"""A model's state under the plain model's names: in pieces, or whole on one rank."""

from __future__ import annotations

import math
from collections.abc import Iterable

import attrs
import torch

from trainwright.collectives import CollectiveError, Communicator, ShardSpec
from trainwright.sharding.data.agreement import recv_json, send_json
from trainwright.sharding.data.held import HeldTensor, agreed_tensors, held_tensors
from trainwright.sharding.data.lifecycle import DataParallel
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.mesh import Mesh

BLOCK_BYTES = 32 * 2**20
_NO_MORE = -1
_FAILED = -2


def piece_state_dict(parallel: DataParallel) -> dict[str, tuple[torch.Tensor, ShardSpec]]:
    """Return what this rank holds, each tensor with its place in the plain model's.

    Args:
        parallel: The model.

    Returns:
        By the plain model's name, in the order of its ``state_dict``: the masters of trained
        parameters, frozen parameters and persistent buffers. No copies: saving must be over
        before the next update. A tied tensor stands under its first name, and what this rank
        holds nothing of is absent. An element counts on the rank whose coordinate is 0 on every
        axis of ``spec.replicated``.
    """
    return {held.name: (held.tensor, held.spec) for held in held_tensors(parallel)}


def full_state_dict(
    parallel: DataParallel,
    *,
    root: int = 0,
    device: torch.device | str = "cpu",
    block_bytes: int = BLOCK_BYTES,
) -> dict[str, torch.Tensor]:
    """Collect the plain model's ``state_dict`` on one rank; all ranks of the mesh call it.

    Trained parameters are the masters' values in the module's dtype. Tied names share one tensor.
    Modules' extra state is not part of it.

    Args:
        parallel: The model, between two steps.
        root: The rank of the world that gets it.
        device: Where it is to be on root.
        block_bytes: Root has the result and one block of at most this size; a sender one block.

    Returns:
        On root all parameters and persistent buffers by name, stage by stage in each module's
        order; an empty dict elsewhere.

    Raises:
        ShardingError: There is no such root, ``block_bytes`` is below 1, or root could not collect
            it, such as where placements do not tile a parameter.

    Communicates:
        One all-reduce of 8 bytes. Root asks for each piece that it does not hold, block by block,
        and is sent it: the bytes of the module's weights in all, on the mesh's world.
    """
    mesh = parallel.mesh
    world = mesh.world
    check_transfer(world, root, block_bytes)
    held = [item for item in agreed_tensors(parallel) if item.counts_on(mesh)]
    if world.rank != root:
        _serve(world, root, held)
        return {}
    try:
        found = _collect(mesh, held, torch.device(device), block_bytes)
    except CollectiveError:
        raise  # the others learn of it by themselves
    except Exception:
        _dismiss(world, _FAILED)
        raise
    _dismiss(world, _NO_MORE)
    return found


def check_transfer(world: Communicator, root: int | None, block_bytes: int) -> None:
    """Raise unless ``root`` is a rank, or None, and blocks have a size."""
    if root is not None and not 0 <= root < world.size:
        raise ShardingError(f"root must be a rank of the world, 0..{world.size - 1}, got {root!r}")
    if block_bytes < 1:
        raise ShardingError(f"block_bytes must be at least 1, got {block_bytes}")


@attrs.frozen(eq=False)
class _Offer:
    """A piece that some rank can send: the ``index``-th that it has."""

    stage: int
    rank: int
    index: int
    names: tuple[str, ...]
    positions: tuple[int, ...]
    dtype: torch.dtype
    spec: ShardSpec


def _collect(
    mesh: Mesh, held: list[HeldTensor], device: torch.device, block_bytes: int
) -> dict[str, torch.Tensor]:
    found: dict[tuple[int, int, str], torch.Tensor] = {}
    for offers in _chosen(_all_offers(mesh, held)):
        first = offers[0]
        numel = sum(offer.spec.numel for offer in offers)
        if numel != math.prod(first.spec.global_shape):
            raise ShardingError(
                f"{first.spec.name}: the ranks hold {numel} elements of shape "
                f"{first.spec.global_shape} together; its placements do not tile it"
            )
        whole = torch.empty(first.spec.global_shape, dtype=first.dtype, device=device)
        for offer in offers:
            mine = held[offer.index] if offer.rank == mesh.rank else None
            _fill(whole, offer, mine, mesh.world, block_bytes)
        for position, name in zip(first.positions, first.names, strict=True):
            found[first.stage, position, name] = whole
    ordered: dict[str, torch.Tensor] = {}
    for place in sorted(found):
        ordered.setdefault(place[2], found[place])
    return ordered


def _all_offers(mesh: Mesh, held: list[HeldTensor]) -> list[_Offer]:
    offers: list[_Offer] = []
    for rank in range(mesh.world.size):
        stage = mesh.shape.coordinates(rank)["pp"]
        described = _describe(held) if rank == mesh.rank else recv_json(mesh.world, rank)
        for index, (names, positions, dtype, spec) in enumerate(described):
            spec = ShardSpec.from_json(spec)
            dtype = getattr(torch, dtype)
            offers.append(_Offer(stage, rank, index, tuple(names), tuple(positions), dtype, spec))
    return offers


def _chosen(offers: Iterable[_Offer]) -> list[list[_Offer]]:
    """Group the offers by tensor, in order; of what two stages hold the first stage's counts."""
    by_name: dict[str, list[_Offer]] = {}
    for offer in sorted(offers, key=lambda item: (item.stage, item.positions, item.rank)):
        group = by_name.setdefault(offer.spec.name, [])
        if not group or group[0].stage == offer.stage:
            group.append(offer)
    return list(by_name.values())


def _fill(
    whole: torch.Tensor,
    offer: _Offer,
    mine: HeldTensor | None,
    world: Communicator,
    block_bytes: int,
) -> None:
    step = max(block_bytes // whole.itemsize, 1)
    for start in range(0, offer.spec.numel, step):
        stop = min(start + step, offer.spec.numel)
        if mine is not None:
            block = _block(mine, start, stop)
        else:
            block = torch.empty(stop - start, dtype=whole.dtype, device=world.device)
            world.send(_request(world, offer.index, start, stop), offer.rank).wait()
            world.recv(block.view(torch.uint8), offer.rank).wait()
        offer.spec.narrow(start, stop).insert(block.to(whole.device), whole)


def _serve(world: Communicator, root: int, held: list[HeldTensor]) -> None:
    send_json(world, _describe(held), root)
    request = _request(world, _NO_MORE, 0, 0)
    while True:
        world.recv(request, root).wait()
        index, start, stop = request.tolist()
        if index == _NO_MORE:
            return
        if index == _FAILED:
            raise ShardingError(f"rank {root} could not collect the state; its error says why")
        # What is offloaded is not on the device that messages are sent from.
        block = _block(held[index], start, stop).to(world.device)
        world.send(block.view(torch.uint8), root).wait()


def _dismiss(world: Communicator, reason: int) -> None:
    for peer in range(world.size):
        if peer != world.rank:
            world.send(_request(world, reason, 0, 0), peer).wait()


def _describe(held: list[HeldTensor]) -> list[list[object]]:
    return [
        [
            list(item.names),
            list(item.positions),
            str(item.dtype).removeprefix("torch."),
            item.spec.to_json(),
        ]
        for item in held
    ]


def _block(held: HeldTensor, start: int, stop: int) -> torch.Tensor:
    return held.tensor.reshape(-1)[start:stop].to(held.dtype).contiguous()


def _request(world: Communicator, index: int, start: int, stop: int) -> torch.Tensor:
    return torch.tensor([index, start, stop], device=world.device)
