"""Allocates the flat buffers of a group and cuts its buckets and pieces out of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
import torch
from torch import nn

from trainwright.collectives import Communicator, ShardSpec, SingleCommunicator
from trainwright.sharding.data.buckets import Bucket, KeptPiece, Member
from trainwright.sharding.data.layout import BucketLayout, GroupKey, GroupLayout, ParameterRange
from trainwright.sharding.data.parameters import ModelParameter
from trainwright.sharding.data.piece import Piece
from trainwright.sharding.data.policy import ShardPolicy
from trainwright.sharding.mesh import Mesh


@attrs.frozen(eq=False)
class FlatBuffers:
    """The contiguous memory of one group.

    Args:
        weights: What the module's parameters are views of.
        gradients: Where their gradients accumulate.
        masters: All weights in the masters' dtype; ``weights`` itself where the dtypes agree.
        data: Joins the ranks that gradients are summed over first.
        partial: Joins the ranks whose sums are added afterwards, one an axis.
    """

    weights: torch.Tensor
    gradients: torch.Tensor
    masters: torch.Tensor
    data: Communicator
    partial: tuple[Communicator, ...]


def data_communicator(mesh: Mesh, key: GroupKey) -> Communicator:
    """Return what joins the ranks that a group's buckets are reduced over and cut for."""
    if not key.data_axes:
        return SingleCommunicator(device=mesh.world.device)
    return mesh.communicator(*key.data_axes)


def allocate(
    group: GroupLayout, entries: Mapping[str, ModelParameter], mesh: Mesh, *, broadcast: bool
) -> FlatBuffers:
    """Return buffers of a group with the weights copied in and all padding zero."""
    key = group.key
    ranges = [part for bucket in group.buckets for part in bucket.parameters]
    device = entries[ranges[0].name].parameter.device
    masters = torch.zeros(group.numel, dtype=key.master_dtype, device=device)
    for part in ranges:
        parameter = entries[part.name].parameter
        masters[part.start : part.stop].view(parameter.shape).copy_(parameter)
    if broadcast:
        broadcast_first(masters, key.replicated_axes, mesh)
    return FlatBuffers(
        masters if key.weight_dtype == key.master_dtype else masters.to(key.weight_dtype),
        torch.zeros_like(masters),
        masters,
        data_communicator(mesh, key),
        tuple(mesh.communicator(axis) for axis in key.partial_axes if mesh.size(axis) > 1),
    )


def broadcast_first(tensor: torch.Tensor, axes: Iterable[str], mesh: Mesh) -> None:
    """Copy the tensor of the rank with coordinate 0 on all ``axes`` to every rank along them."""
    for axis in axes:
        if mesh.size(axis) > 1:
            mesh.communicator(axis).broadcast(tensor, 0).wait()


def make_bucket(
    plan: BucketLayout,
    buffers: FlatBuffers,
    entries: Mapping[str, ModelParameter],
    policy: ShardPolicy,
) -> Bucket:
    """Let the parameters of a bucket be views of the buffers and cut out what this rank keeps."""
    sharded = policy.stage > 0
    start, stop = plan.start, plan.stop
    if sharded:
        start, stop = plan.range_of(buffers.data.rank, buffers.data.size)
    kept_weights = buffers.weights[start:stop]
    kept_masters = kept_weights
    if buffers.masters is not buffers.weights:
        kept_masters = buffers.masters[start:stop]
        # A range of its own memory: the rest of the masters, which others keep, is freed.
        kept_masters = kept_masters.clone() if sharded else kept_masters
    bucket = Bucket(
        members=[_move(entries[part.name], part, buffers) for part in plan.parameters],
        data=buffers.data,
        partial=buffers.partial,
        sharded=sharded,
        wire_dtype=policy.wire_dtype_of(buffers.gradients.dtype),
        gradients=buffers.gradients[plan.start : plan.stop],
        kept_gradients=buffers.gradients[start:stop],
        weights=buffers.weights[plan.start : plan.stop],
        kept_weights=kept_weights,
        kept_masters=kept_masters,
    )
    cut = _cut_range if sharded else _keep_whole
    for part, member in zip(plan.parameters, bucket.members, strict=True):
        kept = cut(bucket, member, entries[part.name], part, start)
        if kept is not None:
            bucket.kept.append(kept)
    return bucket


def _move(entry: ModelParameter, part: ParameterRange, buffers: FlatBuffers) -> Member:
    parameter = entry.parameter
    weight = buffers.weights[part.start : part.stop].view(parameter.shape)
    gradient = buffers.gradients[part.start : part.stop].view(parameter.shape)
    parameter.data = weight
    if weight.dtype != gradient.dtype:
        parameter.grad_dtype = None  # lets a float32 gradient stand beside a 16-bit weight
    return Member(entry.name, parameter, entry.owners, weight, gradient, version=parameter._version)


def _keep_whole(
    bucket: Bucket, member: Member, entry: ModelParameter, part: ParameterRange, start: int
) -> KeptPiece:
    parameter = member.parameter
    if bucket.separate_masters:
        master = bucket.kept_masters[part.start - start : part.stop - start]
        parameter = nn.Parameter(master.view(member.weight.shape))
    return KeptPiece(Piece(entry.name, parameter, entry.spec), member.gradient)


def _cut_range(
    bucket: Bucket, member: Member, entry: ModelParameter, part: ParameterRange, start: int
) -> KeptPiece | None:
    first = max(part.start - start, 0)
    last = min(part.stop - start, bucket.kept_masters.numel())
    if first >= last:
        return None
    offset = start - part.start
    spec = _sharded_spec(entry).narrow(first + offset, last + offset)
    parameter = nn.Parameter(bucket.kept_masters[first:last])
    return KeptPiece(Piece(entry.name, parameter, spec), bucket.kept_gradients[first:last])


def _sharded_spec(entry: ModelParameter) -> ShardSpec:
    # Each rank of the data axes keeps other elements now.
    replicated = [axis for axis in entry.spec.replicated if axis not in entry.key.data_axes]
    return attrs.evolve(entry.spec, replicated=replicated)
