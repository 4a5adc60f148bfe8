"""Allocates the flat buffers of a bucket and cuts its pieces out of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from trainwright.collectives import Communicator
from trainwright.sharding.data.away import AwayWeights, GradientTravel
from trainwright.sharding.data.axes import DataAxes
from trainwright.sharding.data.buckets import Bucket, KeptPiece
from trainwright.sharding.data.coded import CodedPart, CodedWeights
from trainwright.sharding.data.gradients import FlatGradients
from trainwright.sharding.data.layout import BucketLayout, GroupKey, ParameterRange
from trainwright.sharding.data.members import Member
from trainwright.sharding.data.memory import travelling
from trainwright.sharding.data.parameters import ModelParameter
from trainwright.sharding.data.piece import Piece
from trainwright.sharding.data.policy import WEIGHT_DTYPES, ShardPolicy
from trainwright.sharding.data.weights import FlatWeights
from trainwright.sharding.offload import Offload


def make_bucket(
    plan: BucketLayout,
    key: GroupKey,
    entries: Mapping[str, ModelParameter],
    axes: DataAxes,
    policy: ShardPolicy,
    offload: Offload | None = None,
) -> Bucket:
    """Move the parameters of a bucket into flat memory and keep of it what the stage says.

    At stage 3 the parameters are released afterwards, where there is anybody to gather them from.

    Communicates:
        With ``policy.broadcast_weights`` one broadcast along each axis with equal weights.
    """
    weights = _make_weights(plan, key, entries, axes, policy, offload)
    gradients = _make_gradients(plan, key, weights.full.device, axes, policy, offload)
    members = [
        _move(entries[part.name], slice(*_place(part, plan)), weights, gradients)
        for part in plan.parameters
    ]
    bucket = Bucket(members, weights, gradients)
    bucket.release()
    for part, member in zip(plan.parameters, members, strict=True):
        start, stop = _place(part, plan)
        if policy.stage > 0:
            kept = _cut_range(bucket, entries[part.name], start, stop, axes)
        else:
            kept = _keep_whole(bucket, member, entries[part.name], start, stop)
        if kept is not None:
            bucket.kept.append(kept)
    if weights.away is not None and gradients is not None and gradients.travel is not None:
        weights.away.sums = gradients.travel.slot
        weights.away.hold(kept.piece.parameter for kept in bucket.kept)
    return bucket


def _place(part: ParameterRange, plan: BucketLayout) -> tuple[int, int]:
    """Return where a parameter lies in the memory of its bucket."""
    return part.start - plan.start, part.stop - plan.start


def _make_weights(
    plan: BucketLayout,
    key: GroupKey,
    entries: Mapping[str, ModelParameter],
    axes: DataAxes,
    policy: ShardPolicy,
    offload: Offload | None,
) -> FlatWeights:
    data = axes.data(key)
    leaves = offload is not None and key.trainable
    keeps_away = offload is not None and offload.weights is not None
    is_cut = policy.stage == 3 and (data.size > 1 or keeps_away)
    separate = leaves or key.weight_dtype != key.master_dtype
    # What others read when it is published. At stage 3 they read the kept range alone; the whole
    # is gathered into ordinary memory, which can be resized.
    read_on = [data] if policy.stage in (1, 2) else []
    masters = _fill(plan, key, entries, axes, policy, [] if separate else read_on)
    device, numel = masters.device, masters.numel()
    full = masters
    if separate:
        full = travelling(read_on, numel, key.weight_dtype, device).copy_(masters)
    if policy.stage == 0:
        made = FlatWeights(full, full, masters, data, is_cut=False)
        return _offloaded(made, key, offload, axes) if offload is not None else made
    part_numel = numel // data.size
    mine = slice(data.rank * part_numel, (data.rank + 1) * part_numel)
    kept = full[mine]
    if is_cut and not keeps_away:
        # Memory of its own: the rest, which others keep, is freed.
        kept = travelling([data], part_numel, full.dtype, device).copy_(kept)
    kept_masters = masters[mine].clone() if separate and not leaves else kept
    comm = axes.gathers(key) if is_cut else data
    coded = None
    if is_cut and key.is_coded:
        coded = _make_codes(plan, entries, data, kept)
    made = FlatWeights(full, kept, masters[mine] if leaves else kept_masters, comm, is_cut, coded)
    return _offloaded(made, key, offload, axes) if offload is not None else made


def _fill(
    plan: BucketLayout,
    key: GroupKey,
    entries: Mapping[str, ModelParameter],
    axes: DataAxes,
    policy: ShardPolicy,
    read_on: Sequence[Communicator],
) -> torch.Tensor:
    """Return the whole weights of a bucket before they are rounded."""
    device = entries[plan.parameters[0].name].parameter.device
    masters = travelling(read_on, plan.stop - plan.start, key.master_dtype, device).zero_()
    for part in plan.parameters:
        parameter = entries[part.name].parameter
        start, stop = _place(part, plan)
        masters[start:stop].view(parameter.shape).copy_(parameter)
    if policy.broadcast_weights:
        # As bytes: a frozen weight may have any dtype, also one that no reduction knows.
        known = masters.dtype in WEIGHT_DTYPES
        axes.broadcast_first(masters if known else masters.view(torch.uint8), key.replicated_axes)
    return masters


def _offloaded(made: FlatWeights, key: GroupKey, offload: Offload, axes: DataAxes) -> FlatWeights:
    """Keep the masters of weights away from the device, and maybe this rank's part of them."""
    device = made.full.device
    masters = kept = None
    if key.trainable:
        masters = offload.states.allocate(made.masters.numel(), made.masters.dtype, device)
        masters.tensor.copy_(made.masters)
    if made.is_cut and offload.weights is not None:
        kept = offload.weights.allocate(made.kept.numel(), made.kept.dtype, device)
        kept.tensor.copy_(made.kept)
        made.kept = kept.tensor
    elif made.is_cut:
        offload.device.take(made.kept.numel() * made.kept.itemsize)
    offload.device.take(made.full.numel() * made.full.itemsize)
    made.masters = made.kept if masters is None else masters.tensor
    made.away = AwayWeights(offload, made.kept, masters, kept, axes.turns(key))
    made.device = offload.device
    return made


def _make_codes(
    plan: BucketLayout,
    entries: Mapping[str, ModelParameter],
    data: Communicator,
    kept: torch.Tensor,
) -> CodedWeights:
    numel = kept.numel()
    at = data.rank * numel
    parts = []
    for part in plan.parameters:
        codec = entries[part.name].codec
        assert codec is not None, "parameters of a bucket travel alike"
        start, stop = _place(part, plan)
        own = slice(*(min(max(edge - at, 0), numel) for edge in (start, stop)))
        blank = torch.zeros((), device=kept.device)
        parts.append(CodedPart(part.name, codec, slice(start, stop), own, blank))
    return CodedWeights(parts, travelling([data], numel, torch.uint8, kept.device).zero_())


def _make_gradients(
    plan: BucketLayout,
    key: GroupKey,
    device: torch.device,
    axes: DataAxes,
    policy: ShardPolicy,
    offload: Offload | None,
) -> FlatGradients | None:
    if not key.trainable:
        return None
    data = axes.data(key)
    numel = plan.stop - plan.start
    part = numel // data.size
    is_lent = policy.stage >= 2 and (data.size > 1 or offload is not None)
    partial = axes.partial(key)
    dtype = key.master_dtype
    full = travelling([data, *partial], 0 if is_lent else numel, dtype, device).zero_()
    travel = None
    if offload is not None:
        kept_numel = part if policy.stage > 0 else numel
        slot = offload.gradients.allocate(kept_numel, dtype, device)
        kept = slot.tensor.zero_()
        travel = GradientTravel(offload, slot)
        offload.device.take(full.numel() * full.itemsize)
    elif is_lent:
        kept = travelling(partial, part, dtype, device).zero_()
    elif policy.stage > 0:
        kept = full[data.rank * part : (data.rank + 1) * part]
    else:
        kept = full
    return FlatGradients(
        full,
        numel,
        kept,
        _gaps(plan),
        data,
        partial,
        policy.wire_dtype_of(key.master_dtype),
        is_lent,
        is_open=not is_lent,
        travel=travel,
    )


def _gaps(plan: BucketLayout) -> Sequence[slice]:
    last = plan.stop - plan.start
    edges = [0, *(edge for part in plan.parameters for edge in _place(part, plan)), last]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [slice(start, stop) for start, stop in pairs if start < stop]


def _move(
    entry: ModelParameter,
    place: slice,
    weights: FlatWeights,
    gradients: FlatGradients | None,
) -> Member:
    parameter = entry.parameter
    shape = parameter.shape
    weight = weights.full[place].view(shape)
    member = Member(entry.name, parameter, entry.owners, weight, place, gradients is not None)
    member.show()
    if gradients is not None:
        if not gradients.is_lent:
            member.gradient = gradients.full[place].view(shape)
        if gradients.kept.dtype != weight.dtype:
            parameter.grad_dtype = None  # lets a float32 gradient stand beside a 16-bit weight
    if weights.is_cut:
        member.absent = _absent(member.weight)
    member.version = parameter._version
    return member


def _absent(weight: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a weight's shape that takes no memory and is loud when it is read."""
    if weight.dtype.is_floating_point or weight.dtype.is_complex:
        value: float = torch.nan
    elif weight.dtype == torch.bool:
        value = 1
    else:
        value = torch.iinfo(weight.dtype).min
    return torch.full((), value, dtype=weight.dtype, device=weight.device).expand(weight.shape)


def _keep_whole(
    bucket: Bucket, member: Member, entry: ModelParameter, start: int, stop: int
) -> KeptPiece:
    parameter = member.parameter
    if bucket.weights.separate_masters:
        parameter = nn.Parameter(bucket.weights.masters[start:stop].view(member.weight.shape))
    gradient = None
    if bucket.gradients is not None:
        # Not always the memory that backwards add to: offloaded sums are where updates read them.
        gradient = bucket.gradients.kept[start:stop].view(member.weight.shape)
    return KeptPiece(Piece(entry.name, parameter, entry.spec), gradient)


def _cut_range(
    bucket: Bucket, entry: ModelParameter, start: int, stop: int, axes: DataAxes
) -> KeptPiece | None:
    masters = bucket.weights.masters
    at = axes.data(entry.key).rank * masters.numel()
    first = max(start - at, 0)
    last = min(stop - at, masters.numel())
    if first >= last:
        return None
    whole = axes.cut(entry.spec, entry.key)
    spec = whole.narrow(first + at - start, last + at - start)
    trained = bucket.gradients is not None
    parameter = nn.Parameter(masters[first:last], requires_grad=trained)
    gradient = bucket.sums.kept[first:last] if trained else None
    return KeptPiece(Piece(entry.name, parameter, spec), gradient)
