"""Moves a model's parameters into flat buffers."""

from __future__ import annotations

import attrs
import torch
from torch import nn

from trainwright.sharding.data.buckets import Bucket
from trainwright.sharding.data.errors import LifecycleError
from trainwright.sharding.data.flat import (
    allocate,
    broadcast_first,
    data_communicator,
    make_bucket,
)
from trainwright.sharding.data.layout import GroupLayout, LayoutEntry, launch_order, plan_groups
from trainwright.sharding.data.parameters import ModelParameter
from trainwright.sharding.data.piece import Piece
from trainwright.sharding.data.policy import ShardPolicy
from trainwright.sharding.mesh import Mesh


@attrs.frozen(eq=False)
class FlatModel:
    """A model's parameters after they were moved into flat buffers.

    Args:
        layout: Where each parameter lies.
        buckets: In the order in which they are reduced.
        pieces: This rank's parts of the trainable parameters, in the order of registration.
        frozen: The other parameters, whole.
        empty: Trainable parameters without elements; they have no gradient to reduce.
    """

    layout: tuple[GroupLayout, ...]
    buckets: tuple[Bucket, ...]
    pieces: dict[str, Piece]
    frozen: dict[str, Piece]
    empty: tuple[nn.Parameter, ...]

    def check_intact(self) -> None:
        """Raise if a parameter was replaced, moved, frozen or unfrozen since."""
        for bucket in self.buckets:
            for member in bucket.members:
                member.check_intact()
        for name, piece in self.frozen.items():
            if piece.parameter.requires_grad:
                raise LifecycleError(
                    f"{name} was frozen when data_parallel() was called and nobody reduces its "
                    "gradient; set requires_grad before it"
                )

    def check_complete(self, module: nn.Module) -> None:
        """Raise if the module has got a parameter since that nobody would reduce."""
        known = {id(member.parameter) for bucket in self.buckets for member in bucket.members}
        known |= {id(piece.parameter) for piece in self.frozen.values()}
        for name, parameter in module.named_parameters():
            if id(parameter) not in known and parameter.numel() > 0:
                raise LifecycleError(
                    f"{name} was added after data_parallel() and nobody reduces its gradient; "
                    "build the whole module first"
                )


def flatten_model(parameters: list[ModelParameter], mesh: Mesh, policy: ShardPolicy) -> FlatModel:
    """Move trainable parameters into one weight and one gradient buffer a group.

    Afterwards the module's parameters are views of the weight buffers, with the same values.

    Args:
        parameters: Checked by `collect_parameters`.
        mesh: Gives the communicators.
        policy: What a rank keeps.

    Communicates:
        With ``policy.broadcast_weights`` one broadcast of each group, and of each frozen parameter,
        along each axis on which it is replicated.
    """
    trained = {entry.name: entry for entry in parameters if entry.is_reduced}
    others = [entry for entry in parameters if not entry.is_reduced]
    layout = plan_groups(
        [LayoutEntry(entry.name, entry.parameter.numel(), entry.key) for entry in trained.values()],
        lambda key: data_communicator(mesh, key).size if policy.stage > 0 else 1,
        bucket_bytes=policy.bucket_bytes,
        alignment=policy.alignment,
    )
    with torch.no_grad():
        buffers = {
            group.key: allocate(group, trained, mesh, broadcast=policy.broadcast_weights)
            for group in layout
        }
        buckets = tuple(
            make_bucket(bucket, buffers[group.key], trained, policy)
            for group, bucket in launch_order(layout)
        )
        for entry in others:
            _settle(entry, mesh, broadcast=policy.broadcast_weights)
    pieces = {kept.piece.name: kept.piece for bucket in buckets for kept in bucket.kept}
    return FlatModel(
        layout,
        buckets,
        {name: pieces[name] for name in trained if name in pieces},
        {
            entry.name: Piece(entry.name, entry.parameter, entry.spec)
            for entry in others
            if entry.parameter.numel() > 0
        },
        tuple(entry.parameter for entry in others if entry.parameter.requires_grad),
    )


def _settle(entry: ModelParameter, mesh: Mesh, *, broadcast: bool) -> None:
    """Give a parameter that is not trained here its first weights and its dtype."""
    parameter = entry.parameter
    if broadcast and parameter.numel() > 0:
        # As bytes: a frozen weight may have any dtype, also one that no reduction knows.
        data = parameter.detach().contiguous()
        broadcast_first(data.view(-1).view(torch.uint8), entry.placement.replicated_axes, mesh)
        if data.data_ptr() != parameter.data_ptr():
            parameter.copy_(data)
    parameter.data = parameter.data.to(entry.weight_dtype)
