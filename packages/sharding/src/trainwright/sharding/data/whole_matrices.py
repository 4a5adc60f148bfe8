"""Optimizers that need whole matrices, such as Muon, where ranks keep only pieces of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from trainwright.collectives import ShardSpec
from trainwright.sharding.data.errors import LifecycleError
from trainwright.sharding.data.lifecycle import DataParallel
from trainwright.sharding.data.matrix_parts import Matrix
from trainwright.sharding.data.matrix_plan import plan_fleets
from trainwright.sharding.data.selection import KnownParameters, Selection
from trainwright.sharding.errors import ShardingError

MatrixOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer of the parameters given, here always one whole matrix."""


class WholeMatrices(torch.optim.Optimizer):
    """Runs an optimizer on whole matrices, each on the one rank that owns it.

    ``step()`` collects each matrix and its gradient at its owner, which updates it and hands the
    parts back; states live with the owner only. Owners are among the ranks that keep the matrix
    between them: those over which its gradient was cut, and those of tensor or expert parallelism
    that have other parts of it. It acts on the pieces' gradients as they are: clip them before.
    Where ranks keep their matrices whole (stage 0, one data rank) each updates all of them and
    nothing is sent.

    It is a `torch.optim.Optimizer` with one parameter group, this rank's pieces: LR schedulers and
    ``zero_grad()`` work on it. Every matrix has an optimizer of its own, so that step counters,
    wherever they are kept, count steps.

    Args:
        parallel: Whose pieces.
        matrices: Which parameters: their names, the module's parameters, or a rule such as
            ``lambda spec: len(spec.global_shape) == 2``.
        factory: Makes the optimizer of one matrix, for instance
            ``functools.partial(torch.optim.Muon, lr=0.02)``.
        stacked: Take a parameter of more than two dims, such as all experts' weights, for a stack
            of matrices, each with an optimizer of its own; else it is one whole of its own shape.
        round_bytes: Owners hold about this many bytes of whole weights at once, at least one
            matrix, as many of gradients, and twice that in messages.

    Raises:
        ShardingError: A name is unknown, nothing was chosen, or the ranks do not keep each element
            of a matrix once.

    Communicates:
        At first, over each set of ranks that keep matrices between them, two all-gathers of some
        tens of bytes a matrix. In ``step()`` rounds of two all-to-alls over them; in all a rank
        sends 3 (N-1)/N of the matrices' elements it keeps, and receives as much.
    """

    def __init__(
        self,
        parallel: DataParallel,
        matrices: Selection,
        factory: MatrixOptimizer,
        *,
        stacked: bool = False,
        round_bytes: int = 64 * 2**20,
    ) -> None:
        names = KnownParameters.of(parallel).select(matrices, "WholeMatrices")
        if not names:
            raise ShardingError("WholeMatrices was given no trainable parameter")
        self._parallel = parallel
        self._names = tuple(names)
        self._fleets = plan_fleets(parallel, names, stacked=stacked, round_bytes=round_bytes)
        self._parts: dict[str, nn.Parameter] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        for fleet in self._fleets:
            for label in fleet.owned:
                self._parts[label] = _absent(fleet.matrices[label], fleet.like)
                self._optimizers[label] = factory([self._parts[label]])
        template = next(iter(self._optimizers.values()), None)
        if template is None:
            fleet = self._fleets[0]
            template = factory([_absent(next(iter(fleet.matrices.values())), fleet.like)])
        self._pushed = _options(template.param_groups[0])
        kept = [name for name in names if name in parallel.pieces]
        group: dict[str, Any] = {
            "params": [parallel.pieces[name].parameter for name in kept],
            "param_names": kept,
        }
        self._built = False
        super().__init__([group], dict(self._pushed))
        self._built = True

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters, on every rank of the stage alike."""
        return self._names

    @property
    def owned(self) -> dict[str, ShardSpec]:
        """The matrices whose states this rank keeps, whole: each as a part of its parameter."""
        return {
            label: fleet.matrices[label].spec for fleet in self._fleets for label in fleet.owned
        }

    @property
    def inner(self) -> dict[str, tuple[nn.Parameter, torch.optim.Optimizer]]:
        """The optimizer of each of these matrices and what stands for the matrix in it."""
        return {
            label: (self._parts[label], optimizer) for label, optimizer in self._optimizers.items()
        }

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


def _absent(matrix: Matrix, like: torch.Tensor) -> nn.Parameter:
    """Return a stand-in for a whole matrix that takes no memory and cannot be written."""
    value = torch.full((), torch.nan, dtype=like.dtype, device=like.device)
    return nn.Parameter(value.expand(matrix.shape))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
