"""Make the layers of a module tensor-parallel by a plan, and plain again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs
from torch import nn

from trainwright.sharding.errors import ShardingError
from trainwright.sharding.mesh.mesh import Mesh
from trainwright.sharding.placement.parameters import ParameterPlacement
from trainwright.sharding.tensor.building import Setting, changes_of, refuse_dropout
from trainwright.sharding.tensor.changes import Change, Placed, Replacement, Shared
from trainwright.sharding.tensor.dropout import DropoutPlace
from trainwright.sharding.tensor.plan import Match, check_plan, entered_modules, match
from trainwright.sharding.tensor.regions import Residual
from trainwright.sharding.tensor.sequence import SequenceSharding
from trainwright.sharding.tensor.styles import Dropout, NoDropout, Plan

Initializer = Callable[[str, nn.Module], None]
"""Writes every direct parameter and buffer of the module with this name, in place."""

_RECORD = "_trainwright_parallelized"
_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


@attrs.frozen(eq=False)
class _Record:
    """What was done to a module, and which names its parameters share."""

    ranks: int
    changes: tuple[Change, ...]
    ties: dict[tuple[str, str], int]


def parallelize(
    module: nn.Module,
    plan: Plan,
    mesh: Mesh,
    *,
    sequence: SequenceSharding | None = None,
    dropout_place: DropoutPlace | None = None,
) -> nn.Module:
    """Make a module's layers tensor-parallel, in place, as a plan says.

    Every rank has the same whole module, cut here layer by layer; it may be on the meta device.
    Names of modules and parameters stay those of the plain module; tied parameters stay tied. Make
    optimizers, and `data_parallel`, afterwards: the parameters are new ones. Gradients are not
    taken along. Where sequences are cut, hidden states between the layers are this rank's
    positions, in hooks and in outputs of the model too.

    Args:
        module: Any module.
        plan: Styles by name pattern; ``*`` stands for part of one dotted level.
        mesh: The ranks; its axis tp is used.
        sequence: How sequences are cut between the products; None: they are not. Where
            layers are recomputed, sequences in flight whose lengths differ and are no multiples of
            the ranks need `SequenceLength` in the plan, as the plans that ship have.
        dropout_place: Where the training run stands, for the plan's `Dropout`.

    Returns:
        The module itself.

    Raises:
        ShardingError: A pattern matches nothing or two match one module, a style does not fit its
            module, tied parameters would be cut differently, the gradient of a parameter could be
            a term of a sum and the plan does not say, or dropout is not placed. Nothing is changed
            then.

    Communicates:
        Nothing.
    """
    _check_is_plain(module)
    matches = match(module, plan)
    check_plan(module, matches, has_sequence=sequence is not None)
    tp = mesh.communicator("tp")
    setting = Setting(
        tp, Residual(tp, sequence), _parents(module), entered_modules(matches), dropout_place
    )
    changes = [change for each in matches for change in changes_of(each, setting)]
    changes += [
        change
        for name, dropout in _unplaced_dropouts(module, matches)
        for change in refuse_dropout(name, dropout, None, tp)
    ]
    ties = _ties(module)
    _check_ties(module, changes, ties)
    shared = Shared(ties)
    for change in changes:
        change.apply(shared)
    setattr(module, _RECORD, _Record(tp.size, tuple(changes), ties))
    return module


def unparallelize(module: nn.Module, mesh: Mesh) -> nn.Module:
    """Make a module plain again that `parallelize` has cut: whole on every rank, tied as before.

    The modules are the ones that there were before, so that what else holds them sees them whole.
    Parameters are new ones with the values of now; gradients are not taken along.

    Args:
        module: What was given to `parallelize`.
        mesh: The same ranks.

    Returns:
        The module itself.

    Raises:
        ShardingError: The module is not parallelized, the mesh has another tp, or layers were
            changed since.

    Communicates:
        One all-gather of each cut parameter. None at size 1 or on the meta device.
    """
    record = _record_of(module)
    if mesh.size("tp") != record.ranks:
        raise ShardingError(
            f"the module is cut over tp={record.ranks}, the mesh has tp={mesh.size('tp')}"
        )
    for change in record.changes:
        change.check_undo()
    shared = Shared(record.ties)
    for change in reversed(record.changes):
        change.undo(shared)
    delattr(module, _RECORD)
    return module


def cut_initializer(module: nn.Module, initialize: Initializer) -> Initializer:
    """Return an initializer of a cut module from one of the plain module.

    Layers get their parts of what the plain modules would begin with, the same in every layout: one
    plain module at a time is whole. For ``data_parallel(module, ..., initialize=...)`` of a module
    that was cut on the meta device, and for `materialize`.

    Args:
        module: What was given to `parallelize`.
        initialize: Writes every direct parameter of the plain module of that name in place, the
            same on every rank, for instance ``seeded_reset(seed)``.

    Raises:
        ShardingError: The module is not parallelized; when called, a parameter was not written.
    """
    replaced = {
        id(change.layer): change
        for change in _record_of(module).changes
        if isinstance(change, Replacement)
    }

    def initialize_part(name: str, inner: nn.Module) -> None:
        if id(inner) in replaced:
            replaced[id(inner)].initialize(initialize)
        else:
            initialize(name, inner)

    return initialize_part


def _record_of(module: nn.Module) -> _Record:
    record = vars(module).get(_RECORD)
    if not isinstance(record, _Record):
        raise ShardingError(
            f"this {type(module).__name__} is not parallelized; give the module that was given to "
            "parallelize()"
        )
    return record


def _check_is_plain(module: nn.Module) -> None:
    for name, inner in module.named_modules():
        if _RECORD in vars(inner):
            raise ShardingError(
                f"{name or 'the module'} is parallelized already; unparallelize() it first"
            )


def _parents(module: nn.Module) -> dict[int, tuple[tuple[nn.Module, str], ...]]:
    found: dict[int, tuple[tuple[nn.Module, str], ...]] = {}
    for parent in module.modules():
        for key, child in parent._modules.items():
            if child is not None:
                found[id(child)] = (*found.get(id(child), ()), (parent, key))
    return found


def _unplaced_dropouts(
    module: nn.Module, matches: Sequence[Match]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the dropout modules of which the plan says nothing."""
    said = {id(each.module) for each in matches if any(isinstance(s, Dropout) for s in each.styles)}
    for each in matches:
        for style in each.styles:
            if isinstance(style, NoDropout):
                said.add(id(getattr(each.module, style.attribute)))
    for name, inner in module.named_modules():
        if isinstance(inner, _DROPOUTS) and id(inner) not in said:
            yield name, inner


def _ties(module: nn.Module) -> dict[tuple[str, str], int]:
    """Return a number for every parameter, by its module's first name and its own."""
    numbers: dict[int, int] = {}
    return {
        (name, key): numbers.setdefault(id(parameter), len(numbers))
        for name, inner in module.named_modules()
        for key, parameter in inner.named_parameters(recurse=False, remove_duplicate=False)
    }


def _check_ties(
    module: nn.Module, changes: Iterable[Change], ties: Mapping[tuple[str, str], int]
) -> None:
    """Raise where the names of one parameter would be placed differently."""
    said: dict[tuple[str, str], ParameterPlacement] = {}
    for change in changes:
        if isinstance(change, (Replacement, Placed)):
            for key, placement in change.placements().items():
                said[change.name, key] = placement
    first: dict[int, tuple[str, str]] = {}
    for at, number in ties.items():
        other = first.setdefault(number, at)
        if said.get(other) != said.get(at):
            raise ShardingError(
                f"{'.'.join(other)} and {'.'.join(at)} are one parameter, but the plan places them "
                "differently; give both modules styles with the same cut"
            )
