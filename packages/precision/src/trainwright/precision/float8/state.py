"""The scales of all layers under one recipe: agreed once a step, saved and resumed."""

# Shapes: H steps of the history, newest first; T matrices, three a layer.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainwright.collectives import Communicator, ReduceOp
from trainwright.precision.errors import PrecisionError
from trainwright.precision.scale_settings import as_count

from .bound import Float8Products
from .memory import AmaxMemory
from .protocol import Recipe
from .recipes import Delayed
from .roles import Role, Scope

_ROLES = tuple(Role)


class Float8State:
    """The products of layers under a recipe, and what it remembers of their matrices.

    With `Delayed`, call `end_step` once a step, after the last backward of its last microbatch, or
    `discard_step` where its update is not applied. With recipes that remember nothing both only
    count. Running a forward again in the backward, to save memory, changes nothing: within a step
    scales stand still, and a maximum takes no harm from what it has met before.

    Args:
        recipe: how operands are scaled.
        scopes: layer name to the ranks over which it is cut. Layers in whose order or number
            ranks differ, such as experts, need a state of their own.

    Attributes:
        products: layer name to its products, for `Float8Linear` or another layer.
        num_steps: steps ended so far.
    """

    def __init__(self, recipe: Recipe, scopes: Mapping[str, Scope]) -> None:
        self.recipe = recipe
        self.num_steps = 0
        self._delayed = recipe if isinstance(recipe, Delayed) else None
        self._memories: dict[str, AmaxMemory] = {}
        self.products: dict[str, Float8Products] = {}
        for name, scope in scopes.items():
            memories = {role: AmaxMemory() for role in _ROLES} if self._delayed else {}
            self._memories.update((f"{name}.{role.value}", memories[role]) for role in memories)
            self.products[name] = Float8Products(name, recipe, scope, memories)
        self._history_HT = torch.zeros(recipe.history_length, len(self._memories))

    def end_step(self, communicator: Communicator | None = None) -> tuple[str, ...]:
        """Enter this step's largest magnitudes into the history, and set the scales of the next.

        The maximum is over all microbatches and ranks, so that scales are those of one rank that
        has seen everything. A matrix that was not finite in this step teaches nothing: its history
        stays as it was. Waits for the device.

        Args:
            communicator: all ranks with the same layers, or other parts of them: dp and, where
                there are any, tp and cp together; None: this rank alone.

        Returns:
            The names of matrices that held NaN or infinity on any of the ranks, such as
            "layers.0.up.gradient".

        Raises:
            PrecisionError: a layer is cut over more ranks than the communicator can hold.

        Communicates:
            One all-reduce of 12 bytes a layer with `Delayed`, nothing else.
        """
        self._check_ranks(communicator)
        self.num_steps += 1
        if self._delayed is None or not self._memories:
            return ()
        met_T = self._packed(communicator)
        history_HT = self._history_HT.to(met_T.device)
        rolled_HT = torch.cat((met_T[None], history_HT[:-1]))
        # On the device: the history of what was not finite is not rolled.
        is_finite_T = met_T.isfinite()
        self._history_HT = torch.where(is_finite_T, rolled_HT, history_HT)
        self._set_scales(self._delayed)
        for memory in self._memories.values():
            memory.pending = None
        finite = is_finite_T.tolist()
        return tuple(
            name for name, is_finite in zip(self._memories, finite, strict=True) if not is_finite
        )

    def discard_step(self) -> None:
        """End a step whose update is not applied: what it has met is forgotten, scales stay.

        Training goes on as if the step had not been made, whatever its data were. Every rank calls
        it, or none.
        """
        self.num_steps += 1
        for memory in self._memories.values():
            memory.pending = None
            memory.num_steps = self.num_steps

    def histories(self) -> dict[str, torch.Tensor]:
        """Return the largest magnitudes of the last steps, newest first, by matrix."""
        return {name: self._history_HT[:, n].clone() for n, name in enumerate(self._memories)}

    def scales(self) -> dict[str, torch.Tensor]:
        """Return what matrices are multiplied by, by matrix; 1 where nothing is known."""
        return {name: memory.scale.clone() for name, memory in self._memories.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, and history and scale of each matrix by name.

        Raises:
            PrecisionError: a step has begun and not ended: its magnitudes would be lost.
        """
        begun = [name for name, memory in self._memories.items() if memory.pending is not None]
        if begun:
            raise PrecisionError(
                f"{len(begun)} matrices, such as {begun[0]!r}, have met magnitudes in a step that "
                f"has not ended; call end_step before saving"
            )
        return {"num_steps": self.num_steps, "history": self.histories(), "scale": self.scales()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; what a begun step has met is forgotten.

        Raises:
            PrecisionError: the names or the length of the history are others, or something is no
                tensor; nothing is changed then.
        """
        num_steps, history, scale = _parts(state_dict)
        for given, what in ((history, "histories"), (scale, "scales")):
            if set(given) != set(self._memories):
                differing = sorted(set(given) ^ set(self._memories))
                raise PrecisionError(
                    f"{what} are of other matrices than the layers': {len(differing)} differ, such "
                    f"as {differing[0]!r}; convert the same layers under the same recipe"
                )
        for name, steps in history.items():
            if not _is_number(scale[name]):
                raise PrecisionError(f"the scale of {name!r} must be a tensor of one number")
            if not isinstance(steps, torch.Tensor) or not steps.is_floating_point():
                raise PrecisionError(f"the history of {name!r} must be a tensor of magnitudes")
            if steps.shape != self._history_HT.shape[:1]:
                raise PrecisionError(
                    f"the history of {name!r} has shape {list(steps.shape)}, that of the recipe "
                    f"{len(self._history_HT)} steps; load with the recipe that was saved"
                )
        self.num_steps = num_steps
        for number, (name, memory) in enumerate(self._memories.items()):
            self._history_HT[:, number] = history[name].to(self._history_HT)
            memory.scale = scale[name].detach().clone()
            memory.pending = None
        self._set_blanks()

    def _check_ranks(self, communicator: Communicator | None) -> None:
        size = 1 if communicator is None else communicator.size
        for name, bound in self.products.items() if self._delayed else ():
            if size % bound.scope.num_ranks:
                raise PrecisionError(
                    f"layer {name} is cut over {bound.scope.num_ranks} ranks, but end_step was "
                    f"given {size}: give it a communicator of dp and all ranks of scopes together"
                )

    def _packed(self, communicator: Communicator | None) -> torch.Tensor:
        """Return what the step has met, on all ranks."""
        known = [memory.pending for memory in self._memories.values()]
        device = next((met.device for met in known if met is not None), self._history_HT.device)
        if communicator is not None:
            device = communicator.device
        none = torch.zeros((), device=device)
        met_T = torch.stack([none if met is None else met.to(device) for met in known])
        if communicator is not None and communicator.size > 1:
            communicator.all_reduce(met_T, ReduceOp.MAX).wait()
        return met_T

    def _set_scales(self, recipe: Delayed) -> None:
        largest_T = self._history_HT.amax(0)
        scale_T = torch.empty_like(largest_T)
        for place, role in enumerate(_ROLES):
            every = slice(place, None, len(_ROLES))
            scale_T[every] = recipe.scale_from(largest_T[every], role)
        for memory, scale in zip(self._memories.values(), scale_T.unbind(), strict=True):
            memory.scale = scale
        self._set_blanks()

    def _set_blanks(self) -> None:
        blank = (self._history_HT.amax(0) == 0).tolist() if self._memories else []
        for memory, is_blank in zip(self._memories.values(), blank, strict=True):
            memory.is_blank = is_blank
            memory.num_steps = self.num_steps


def _parts(state_dict: Mapping[str, Any]) -> tuple[int, Mapping[str, Any], Mapping[str, Any]]:
    names = ("num_steps", "history", "scale")
    if not isinstance(state_dict, Mapping) or not set(names) <= set(state_dict):
        raise PrecisionError(f"a Float8State must hold {', '.join(names)}, got {state_dict!s:.80}")
    history, scale = state_dict["history"], state_dict["scale"]
    if not isinstance(history, Mapping) or not isinstance(scale, Mapping):
        raise PrecisionError("histories and scales must be dictionaries by name of a matrix")
    return as_count("num_steps", state_dict["num_steps"]), history, scale


def _is_number(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == ()
