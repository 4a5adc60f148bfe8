"""Moves a model's parameters into flat buffers, one unit after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch
from torch import nn

from trainwright.sharding.data.away import reserve
from trainwright.sharding.data.axes import DataAxes
from trainwright.sharding.data.buckets import Bucket
from trainwright.sharding.data.coded import CodedGroup
from trainwright.sharding.data.errors import LifecycleError
from trainwright.sharding.data.flat import make_bucket
from trainwright.sharding.data.layout import GroupLayout, LayoutEntry, launch_order, plan_groups
from trainwright.sharding.data.materialize import Initializer, materialize
from trainwright.sharding.data.parameters import ModelParameter
from trainwright.sharding.data.piece import Piece
from trainwright.sharding.data.policy import ShardPolicy
from trainwright.sharding.data.units import UnitPlan, plan_units
from trainwright.sharding.mesh import Mesh
from trainwright.sharding.offload import Offload


@attrs.frozen(eq=False)
class FlatModel:
    """A model's parameters after they were moved into flat buffers.

    Args:
        layout: Where each parameter lies.
        units: Which parameters are gathered together, outer units first, and their buckets.
        buckets: Those with gradients, in the order in which they are reduced.
        pieces: This rank's parts of the trainable parameters, in the order of registration.
        frozen: Its parts of the other parameters: whole, but cut at stage 3.
        settled: The parameters outside of the buffers, by name: frozen ones below stage 3, and
            those without elements.
        coded: Those whose weights travel as codes.
        parameters: What was known of each parameter, those that this rank keeps nothing of too.
        stage: As in `ShardPolicy`.
    """

    layout: tuple[GroupLayout, ...]
    units: tuple[tuple[UnitPlan, tuple[Bucket, ...]], ...]
    buckets: tuple[Bucket, ...]
    pieces: dict[str, Piece]
    frozen: dict[str, Piece]
    settled: dict[str, nn.Parameter]
    coded: tuple[CodedGroup, ...] = ()
    parameters: tuple[ModelParameter, ...] = ()
    stage: int = 0

    def encode(self) -> None:
        """Make codes of the weights that travel as such, once they have changed.

        Communicates:
            One all-reduce of 4 bytes a parameter over the ranks that hold parts of it.
        """
        for group in self.coded:
            group.encode()

    @property
    def all_buckets(self) -> Iterator[Bucket]:
        """Every bucket, trained or not."""
        return (bucket for _, buckets in self.units for bucket in buckets)

    def check_intact(self) -> None:
        """Raise if a parameter was replaced, moved, frozen or unfrozen since."""
        for bucket in self.all_buckets:
            bucket.check_intact()
        for name, parameter in self.settled.items():
            if parameter.requires_grad and parameter.numel() > 0:
                raise LifecycleError(
                    f"{name} was frozen when data_parallel() was called and nobody reduces its "
                    "gradient; set requires_grad before it"
                )

    def check_complete(self, module: nn.Module) -> None:
        """Raise if the module has got a parameter since that nobody would reduce."""
        known = {id(member.parameter) for bucket in self.all_buckets for member in bucket.members}
        known |= {id(parameter) for parameter in self.settled.values()}
        for name, parameter in module.named_parameters():
            if id(parameter) not in known and parameter.numel() > 0:
                raise LifecycleError(
                    f"{name} was added after data_parallel() and nobody reduces its gradient; "
                    "build the whole module first"
                )


def flatten_model(
    model: nn.Module,
    parameters: Sequence[ModelParameter],
    mesh: Mesh,
    policy: ShardPolicy,
    initialize: Initializer | None = None,
    offload: Offload | None = None,
) -> FlatModel:
    """Move the parameters of a model into flat buffers.

    Afterwards trained parameters are views of their buckets' weights, with the same values, or, at
    stage 3, released.

    Args:
        model: The model.
        parameters: Its parameters, checked by `collect_parameters`.
        mesh: Gives the communicators.
        policy: What a rank keeps.
        initialize: Gives values to what is on the meta device, a unit before the next.
        offload: Keeps states away from the device.

    Communicates:
        Stage 3: one split a distinct set of data axes. With ``policy.broadcast_weights`` one
        broadcast of each bucket, and of each parameter outside of them, along each axis on which
        it is replicated. What `FlatModel.encode` says.
    """
    entries = {entry.name: entry for entry in parameters}
    units = plan_units(model, policy.units, _tied_over_ends(parameters, mesh))
    axes = DataAxes(mesh, policy.stage)
    layout = _plan(units, entries, axes, policy)
    reserve(layout, policy.stage, mesh, offload)
    made: dict[int, Bucket] = {}
    built: list[tuple[UnitPlan, tuple[Bucket, ...]]] = []
    if initialize is not None:
        materialize(_holders(model, (), entries), mesh.world.device, initialize)
    with torch.no_grad():
        for unit in units:
            if initialize is not None:
                holders = _holders(model, unit.parameters, entries)
                materialize(holders, mesh.world.device, initialize)
            plans = [(plan, g.key) for g in layout if g.unit == unit.name for plan in g.buckets]
            for plan, key in plans:
                made[id(plan)] = make_bucket(plan, key, entries, axes, policy, offload)
            for name in unit.parameters:
                if not _is_flat(entries[name], policy):
                    _settle(entries[name], axes, broadcast=policy.broadcast_weights)
            built.append((unit, tuple(made[id(plan)] for plan, _ in plans)))
    pieces = {kept.piece.name: kept.piece for bucket in made.values() for kept in bucket.kept}
    settled = {name: entry for name, entry in entries.items() if not _is_flat(entry, policy)}
    pieces |= {n: Piece(n, e.parameter, e.spec) for n, e in settled.items() if e.parameter.numel()}
    coded = _coded_groups(parameters, list(made.values()), axes)
    return FlatModel(
        layout,
        tuple(built),
        tuple(made[id(plan)] for group, plan in launch_order(layout) if group.key.trainable),
        {name: pieces[name] for name, entry in entries.items() if name in pieces and entry.trained},
        {name: pieces[name] for name, e in entries.items() if name in pieces and not e.trained},
        {name: entry.parameter for name, entry in settled.items()},
        coded,
        tuple(parameters),
        policy.stage,
    )


def _coded_groups(
    parameters: Sequence[ModelParameter], buckets: Sequence[Bucket], axes: DataAxes
) -> tuple[CodedGroup, ...]:
    """Encode parameters, by the ranks that hold parts of them, in one order everywhere."""
    groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[ModelParameter]] = {}
    for entry in parameters:
        if entry.codec is not None and axes.data(entry.key).size > 1:
            ranks = (entry.key.data_axes, axes.cut_weights(entry.placement.weight))
            groups.setdefault(ranks, []).append(entry)
    found = []
    for (_, cut), entries in groups.items():
        names = {entry.name for entry in entries}
        held = [
            (bucket.weights.kept, bucket.weights.coded)
            for bucket in buckets
            if bucket.weights.coded is not None and bucket.members[0].name in names
        ]
        comms = (axes.data(entries[0].key), *(axes.over(axis) for axis in cut))
        found.append(CodedGroup(tuple(entry.name for entry in entries), comms, held))
    with torch.no_grad():
        for group in found:
            group.encode()
    return tuple(found)


def _holders(
    model: nn.Module, names: Sequence[str], entries: Mapping[str, ModelParameter]
) -> list[tuple[str, nn.Module]]:
    """Return the modules that directly hold one of the parameters, or, of none, no parameter."""
    if names:
        chosen = {id(owner) for name in names for owner, _ in entries[name].owners}
    else:
        held = {id(owner) for entry in entries.values() for owner, _ in entry.owners}
        chosen = {id(module) for module in model.modules()} - held
    return [(name, module) for name, module in model.named_modules() if id(module) in chosen]


def _plan(
    units: Sequence[UnitPlan],
    entries: Mapping[str, ModelParameter],
    axes: DataAxes,
    policy: ShardPolicy,
) -> tuple[GroupLayout, ...]:
    unit_of = {name: unit.name for unit in units for name in unit.parameters}
    return plan_groups(
        [
            LayoutEntry(name, entry.parameter.numel(), entry.key, unit_of[name])
            for name, entry in entries.items()
            if _is_flat(entry, policy)
        ],
        lambda key: axes.data(key).size if policy.stage > 0 else 1,
        bucket_bytes=policy.bucket_bytes if policy.stage < 3 else None,
        alignment=policy.alignment,
    )


def _is_flat(entry: ModelParameter, policy: ShardPolicy) -> bool:
    """Return whether a parameter has a place in the flat buffers."""
    return entry.parameter.numel() > 0 and (entry.trained or policy.stage == 3)


def _tied_over_ends(parameters: Sequence[ModelParameter], mesh: Mesh) -> list[str]:
    if mesh.size("pp") == 1:
        return []
    return [entry.name for entry in parameters if "pp" in entry.placement.reduction_axes]


def _settle(entry: ModelParameter, axes: DataAxes, *, broadcast: bool) -> None:
    """Give a parameter outside of the buffers its first weights and its dtype."""
    parameter = entry.parameter
    if broadcast and parameter.numel() > 0:
        # As bytes: a frozen weight may have any dtype, also one that no reduction knows.
        data = parameter.detach().contiguous()
        axes.broadcast_first(data.view(-1).view(torch.uint8), entry.placement.replicated_axes)
        if data.data_ptr() != parameter.data_ptr():
            parameter.copy_(data)
    parameter.data = parameter.data.to(entry.weight_dtype)
