"""16-bit weights without masters: a float32 update, written without losing its small part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Never

import torch

from trainwright.precision.bundles import BundledStep, Scratch
from trainwright.precision.errors import NotAvailableError, PrecisionError
from trainwright.precision.moments import Moments
from trainwright.precision.parameter_groups import (
    NamedParameters,
    OptimizerFactory,
    ParameterGroups,
    copy_options,
    named_groups,
)
from trainwright.precision.weight_rounding import WeightRounding


class RoundedWeights(torch.optim.Optimizer):
    """An optimizer of BF16 or FP16 weights that holds no float32 copy of them.

    It takes the place of the optimizer in PyTorch's loop. ``step`` casts a bundle of weights up,
    lets the optimizer update them in float32 and rounds the result into the model, stochastically
    or with compensation, so that updates below a weight's spacing are not lost. Parameters of at
    least float32 are updated where they are. ``param_groups`` hold the model's own parameters;
    learning-rate schedulers of ``torch.optim`` accept it as it is.

    Args:
        parameters: ``model.named_parameters()``, or parameter groups whose "params" are
            (name, parameter) pairs.
        factory: makes the optimizer from parameter groups, such as
            ``functools.partial(torch.optim.AdamW, lr=1e-3)``. Its ``step`` is called once a bundle.
        rounding: `StochasticRounding` or `KahanCompensation`.
        moments: as in `MasterWeights`.
        grad_dtype: of the gradients of 16-bit weights; float32, so that micro-batches are summed
            there, or None: the weight's own, at half the memory, which loses small ones.

    Raises:
        PrecisionError: parameters without names, a weight that cannot be rounded, a gradient that
            is there already in another dtype, or another ``grad_dtype``.
        NotAvailableError: the optimizer's step couples its parameters.
    """

    def __init__(
        self,
        parameters: NamedParameters | ParameterGroups,
        factory: OptimizerFactory,
        *,
        rounding: WeightRounding,
        moments: Moments | None = None,
        grad_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        if grad_dtype not in (torch.float32, None):
            raise PrecisionError(
                f"grad_dtype must be torch.float32, or None for the weight's own, got {grad_dtype}"
            )
        groups = named_groups(parameters)
        self._rounding = rounding
        pairs = [pair for group in groups for pair in group["params"]]
        self._weights = [weight for _, weight in pairs]
        stand_ins = [_stand_in(weight) for weight in self._weights]
        self._names = {own: name for own, (name, _) in zip(stand_ins, pairs, strict=True)}
        self._narrow = {
            own: weight
            for own, weight in zip(stand_ins, self._weights, strict=True)
            if own is not weight
        }
        for own, weight in self._narrow.items():
            rounding.check(self._names[own], weight)
        self._residuals = {own: rounding.residual(w.detach()) for own, w in self._narrow.items()}
        self._scratch = Scratch()
        following = iter(stand_ins)
        of_inner = [
            {**group, "params": [(name, next(following)) for name, _ in group["params"]]}
            for group in groups
        ]
        self._inner = factory(of_inner)
        self._bundled = BundledStep(self._inner, self._names, moments)
        self._sealed = False
        super().__init__(groups, self._inner.defaults)
        self._sealed = True
        copy_options(self._inner.param_groups, self.param_groups)
        if grad_dtype is not None:
            for own, weight in self._narrow.items():
                _widen(self._names[own], weight, grad_dtype)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the weights that have a gradient.

        Raises:
            NotAvailableError: a closure was given, or the optimizer cannot be stepped in bundles.
        """
        if closure is not None:
            raise NotAvailableError("RoundedWeights.step takes no closure; call it without one")
        copy_options(self.param_groups, self._inner.param_groups)
        graded = [
            own
            for own, weight in zip(self._names, self._weights, strict=True)
            if weight.grad is not None
        ]
        self._bundled.step(graded, self._widen_bundle, self._round_bundle)
        copy_options(self._inner.param_groups, self.param_groups)
        self._show_state()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state in torch's form, and what is kept beside the weights.

        Returns:
            "state" and "param_groups" as in torch; moments as they are kept; "updates": the number
            of steps; "compensations": name to tensor, empty where the rounding keeps none. The
            tensors are the live ones, as in torch.
        """
        copy_options(self.param_groups, self._inner.param_groups)
        return {**self._bundled.state_dict(), "compensations": self._compensations()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over moments, options, steps and compensations; the model is loaded by itself.

        Raises:
            PrecisionError: names, shapes or compensations do not fit; nothing is changed then.
        """
        given = state_dict.get("compensations", {})
        own = self._compensations()
        if {name: t.shape for name, t in given.items()} != {n: t.shape for n, t in own.items()}:
            raise PrecisionError(
                f"the state has compensations of {sorted(given)}, this optimizer of {sorted(own)}; "
                "load a state of the same rounding and parameters"
            )
        for saved, group in zip(state_dict["param_groups"], self._inner.param_groups, strict=False):
            if saved.get("param_names", group["param_names"]) != group["param_names"]:
                raise PrecisionError(
                    f"the state is that of parameters {saved['param_names']}, "
                    f"but this optimizer has {group['param_names']}"
                )
        self._bundled.load_state_dict(state_dict)
        for name, tensor in own.items():
            tensor.copy_(given[name])
        copy_options(self._inner.param_groups, self.param_groups)
        self._show_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: parameter groups are fixed when the optimizer is made."""
        if self._sealed:
            raise NotAvailableError(
                "adding a parameter group is not available yet; make a new RoundedWeights of all "
                "parameters and load the old one's state"
            )
        super().add_param_group(param_group)

    def __reduce__(self) -> Never:
        raise PrecisionError("RoundedWeights cannot be pickled or copied; keep its state_dict()")

    def _widen_bundle(self, bundle: Sequence[torch.Tensor]) -> None:
        narrow = [own for own in bundle if own in self._narrow]
        cast = [own for own in narrow if _gradient(self._narrow[own]).dtype is not torch.float32]
        self._scratch.reserve([*narrow, *cast])
        for own in narrow:
            weight = self._narrow[own]
            values = self._scratch.take(own)
            self._rounding.read(weight.detach(), self._residuals[own], values)
            own.data = values
            gradient = _gradient(weight)
            if gradient.dtype is not torch.float32:
                gradient = self._scratch.take(own).copy_(gradient)
            own.grad = gradient

    def _round_bundle(self, bundle: Sequence[torch.Tensor]) -> None:
        for own in bundle:
            if own not in self._narrow:
                continue
            weight, residual = self._narrow[own].detach(), self._residuals[own]
            update = self._bundled.updates
            self._rounding.write(own.detach(), weight, residual, self._names[own], update)
            own.grad = None
            own.data = _no_memory(weight)

    def _compensations(self) -> dict[str, torch.Tensor]:
        kept = self._residuals.items()
        return {self._names[own]: residual for own, residual in kept if residual is not None}

    def _show_state(self) -> None:
        # Under the model's parameters, for tools that look moments up there.
        self.state.clear()
        for own, weight in zip(self._names, self._weights, strict=True):
            if shown := self._bundled.shown(own):
                self.state[weight] = shown


def _stand_in(weight: torch.Tensor) -> torch.Tensor:
    """Return what the inner optimizer has as its parameter: it gets memory only for its bundle."""
    if torch.promote_types(weight.dtype, torch.float32) == weight.dtype:
        return weight
    return torch.nn.Parameter(_no_memory(weight), requires_grad=weight.requires_grad)


def _no_memory(weight: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), device=weight.device).expand(weight.shape)


def _gradient(weight: torch.Tensor) -> torch.Tensor:
    gradient: torch.Tensor | None = weight.grad
    assert gradient is not None
    return gradient


def _widen(name: str, weight: torch.Tensor, dtype: torch.dtype) -> None:
    if weight.grad is not None and weight.grad.dtype is not dtype:
        raise PrecisionError(
            f"{name} already has a gradient in {weight.grad.dtype}; make RoundedWeights before the "
            "first backward pass, or with grad_dtype=None"
        )
    weight.grad_dtype = dtype
