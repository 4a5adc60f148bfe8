"""Optimizers that need whole matrices, such as Muon, where ranks keep only pieces of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trainwright.collectives import Communicator, ShardSpec
from trainwright.sharding.data.axes import DataAxes
from trainwright.sharding.data.errors import LifecycleError
from trainwright.sharding.data.layout import GroupLayout
from trainwright.sharding.data.lifecycle import DataParallel
from trainwright.sharding.data.matrix_exchange import Fleet, Matrix
from trainwright.sharding.data.ownership import piece_spec_on
from trainwright.sharding.data.selection import KnownParameters, Selection
from trainwright.sharding.errors import NotAvailableError, ShardingError
from trainwright.sharding.mesh.shape import DENSE_AXES, EXPERT_AXES

MatrixOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer of the parameters given, here always one whole matrix."""


class WholeMatrices(torch.optim.Optimizer):
    """Runs an optimizer on whole matrices, each on the one data rank that owns it.

    ``step()`` collects each matrix and its gradient at its owner, which updates it and hands the
    pieces back; states live with the owner only. It acts on the pieces' gradients as they are:
    clip them before. Where ranks keep their matrices whole (stage 0, one data rank) each updates
    all of them and nothing is sent.

    It is a `torch.optim.Optimizer` with one parameter group, this rank's pieces: LR schedulers and
    ``zero_grad()`` work on it. Every matrix has an optimizer of its own, so that step counters,
    wherever they are kept, count steps.

    Args:
        parallel: Whose pieces.
        matrices: Which parameters: their names, the module's parameters, or a rule such as
            ``lambda spec: len(spec.global_shape) == 2``.
        factory: Makes the optimizer of one matrix, for instance
            ``functools.partial(torch.optim.Muon, lr=0.02)``.
        round_bytes: Owners hold about this many bytes of whole weights at once, at least one
            matrix, as many of gradients, and twice that in messages.

    Raises:
        ShardingError: A name is unknown, or nothing was chosen.
        NotAvailableError: A matrix is cut by tensor or expert parallelism: this rank's data ranks
            do not hold the whole of it between them.

    Communicates:
        In ``step()``, over the data ranks, rounds of two all-to-alls; in all a rank sends
        3 (N-1)/N of the matrices' elements it keeps, and receives as much.
    """

    def __init__(
        self,
        parallel: DataParallel,
        matrices: Selection,
        factory: MatrixOptimizer,
        *,
        round_bytes: int = 64 * 2**20,
    ) -> None:
        known = KnownParameters.of(parallel)
        names = known.select(matrices, "WholeMatrices")
        if not names:
            raise ShardingError("WholeMatrices was given no trainable parameter")
        specs = {name: known.trained[name] for name in names}
        _check_whole(names, parallel)
        self._parallel = parallel
        self._specs = specs
        self._fleets = _make_fleets(parallel, specs, round_bytes)
        found = {name: m for fleet in self._fleets for name, m in fleet.matrices.items()}
        self._parts: dict[str, nn.Parameter] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        for name in (name for fleet in self._fleets for name in fleet.owned):
            self._parts[name] = _absent(found[name])
            self._optimizers[name] = factory([self._parts[name]])
        first = next(iter(found.values()))
        template = next(iter(self._optimizers.values()), None) or factory([_absent(first)])
        self._pushed = _options(template.param_groups[0])
        kept = {name: found[name].parameter for name in names}
        group: dict[str, Any] = {
            "params": [parameter for parameter in kept.values() if parameter is not None],
            "param_names": [name for name, parameter in kept.items() if parameter is not None],
        }
        self._built = False
        super().__init__([group], dict(self._pushed))
        self._built = True

    @property
    def names(self) -> tuple[str, ...]:
        """The matrices, on every rank alike."""
        return tuple(self._specs)

    @property
    def owned(self) -> dict[str, ShardSpec]:
        """The matrices whose states this rank keeps, whole, for the checkpoint."""
        return {name: fleet.matrices[name].spec for fleet in self._fleets for name in fleet.owned}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction: owners are planned once for all matrices."""
        if getattr(self, "_built", False):
            raise ShardingError("WholeMatrices takes no further groups; build another one")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all matrices once; every rank calls it, after ``wait()``.

        Raises:
            LifecycleError: A piece has no reduced gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Of all pieces: a rank that keeps nothing of the matrices must raise with the others.
        missing = [n for n, piece in self._parallel.pieces.items() if piece.parameter.grad is None]
        if missing:
            raise LifecycleError(
                f"{missing[0]} has no reduced gradient; call reduce() and wait() before step(), "
                "and clear gradients (the DataParallel's zero_grad()) after all optimizers"
            )
        self._push_options()
        for fleet in self._fleets:
            fleet.update(self._update)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the states of this rank's `owned` matrices by name, and the options.

        Returns:
            ``"state"``: by name what the optimizer keeps for the matrix; ``"groups"``: by name
            the options as it holds them; ``"param_groups"``: one group, with all names under
            ``"params"``. The union of all data ranks' ``"state"`` and ``"groups"`` is the state of
            the whole and loads in any layout.
        """
        return {
            "state": {
                name: dict(optimizer.state[self._parts[name]])
                for name, optimizer in self._optimizers.items()
            },
            "groups": {
                name: _options(optimizer.param_groups[0])
                for name, optimizer in self._optimizers.items()
            },
            "param_groups": [{**_options(self.param_groups[0]), "params": list(self.names)}],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take states by name; those of matrices that others own may be there too.

        Raises:
            ShardingError: The matrices are not these, or the state of an owned one is missing.
        """
        saved = state_dict["param_groups"][0]
        if set(saved["params"]) != set(self.names):
            differing = sorted(set(saved["params"]) ^ set(self.names))
            raise ShardingError(
                f"the state is of other matrices; {', '.join(differing)} are in one only"
            )
        missing = [name for name in self._optimizers if name not in state_dict["state"]]
        if missing:
            raise ShardingError(
                f"there is no state of {', '.join(missing)}, which this rank owns here; merge "
                "'state' and 'groups' of all data ranks that saved"
            )
        for name, optimizer in self._optimizers.items():
            options = state_dict["groups"].get(name, _options(saved))
            state = state_dict["state"][name]
            optimizer.load_state_dict(
                {
                    "state": {0: state} if state else {},
                    "param_groups": [{**optimizer.param_groups[0], **options, "params": [0]}],
                }
            )
        self.param_groups[0].update(_options(saved))
        self._pushed = _options(self.param_groups[0])

    def _push_options(self) -> None:
        """Hand options that a scheduler or the user changed on to the matrices' optimizers."""
        # Others are left alone: an optimizer may keep a counter among its options.
        options = _options(self.param_groups[0])
        changed = {
            key: value
            for key, value in options.items()
            if key not in self._pushed or value is not self._pushed[key]
        }
        for optimizer in self._optimizers.values():
            inner = optimizer.param_groups[0]
            inner.update({key: value for key, value in changed.items() if key in inner})
        self._pushed = options

    def _update(
        self, weights: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]
    ) -> None:
        for name, weight in weights.items():
            part = self._parts[name]
            absent = part.data
            part.data = weight
            part.grad = gradients[name]
            self._optimizers[name].step()
            part.data = absent
            part.grad = None


def _check_whole(names: Sequence[str], parallel: DataParallel) -> None:
    # By the plan, which is the same on every rank, whatever pieces a rank keeps.
    groups = _groups_of(parallel)
    for name in names:
        key = groups[name].key
        named = {*key.reduction_axes, *key.replicated_axes}
        view = EXPERT_AXES if named & (set(EXPERT_AXES) - {"pp"}) else DENSE_AXES
        for axis in view:
            size = parallel.mesh.size(axis)
            if axis != "pp" and axis not in key.replicated_axes and size > 1:
                raise NotAvailableError(
                    f"{name} is cut over {axis}={size}, so that no data rank's peers hold the "
                    "whole of it; leave it to an element-wise optimizer"
                )


def _groups_of(parallel: DataParallel) -> dict[str, GroupLayout]:
    return {
        part.name: group
        for group in parallel.layout
        for bucket in group.buckets
        for part in bucket.parameters
    }


def _absent(matrix: Matrix) -> nn.Parameter:
    """Return a stand-in for a whole matrix that takes no memory and cannot be written."""
    value = torch.full((), torch.nan, dtype=matrix.like.dtype, device=matrix.like.device)
    return nn.Parameter(value.expand(matrix.spec.local_shape))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _make_fleets(
    parallel: DataParallel, specs: Mapping[str, ShardSpec], round_bytes: int
) -> list[Fleet]:
    pieces = parallel.pieces
    groups = _groups_of(parallel)
    device = next(parallel.module.parameters()).device
    axes = DataAxes(parallel.mesh, stage=1)  # where anything is cut at all
    fleets: dict[tuple[object, ...], dict[str, Matrix]] = {}
    data: dict[tuple[object, ...], Communicator | None] = {}
    for name, spec in specs.items():
        group = groups[name]
        cut = group.num_ranks > 1
        key = (group.key.data_axes, group.key.master_dtype, cut)
        data[key] = axes.data(group.key) if cut else None
        fleets.setdefault(key, {})[name] = Matrix(
            axes.cut(spec, group.key) if cut else spec,
            tuple(_kept_range(group, spec, rank) for rank in range(group.num_ranks)),
            pieces[name].parameter if name in pieces else None,
            torch.empty(0, dtype=group.key.master_dtype, device=device),
        )
    return [Fleet(matrices, data[key], round_bytes) for key, matrices in fleets.items()]


def _kept_range(group: GroupLayout, spec: ShardSpec, rank: int) -> tuple[int, int]:
    piece = piece_spec_on([group], spec, spec.name, rank)
    return (0, 0) if piece is None else (piece.start, piece.stop)
