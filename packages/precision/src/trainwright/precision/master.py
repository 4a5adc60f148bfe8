"""FP32 master weights: a half-precision model under any optimizer of ``torch.optim``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Never

import torch

from trainwright.precision.bundles import BundledStep, unpack
from trainwright.precision.deferred import skips_by_itself
from trainwright.precision.errors import NotAvailableError, PrecisionError
from trainwright.precision.moments import Moments
from trainwright.precision.parameter_groups import (
    NamedParameters,
    OptimizerFactory,
    ParameterGroups,
    copy_options,
    named_groups,
)
from trainwright.precision.passing import Comparison, OnePass


class MasterWeights(torch.optim.Optimizer):
    """An optimizer whose update, moments and gradients are FP32 though the model is 16-bit.

    It takes the place of the optimizer in PyTorch's loop. Its ``param_groups`` hold the model's own
    parameters, whose ``.grad`` is float32: autograd casts each 16-bit gradient up and sums
    micro-batches there, and clipping and loss scalers work on true FP32 gradients. ``step`` updates
    the FP32 masters and rounds them into the model. A weight that was changed in the model since
    then (loaded, swapped, filled) is noticed element by element at the next ``step`` or
    ``state_dict`` and taken over; elements not changed keep all their digits. Parameters of at
    least float32 are their own masters, so float64 is never lowered. Learning-rate schedulers of
    ``torch.optim`` accept it as it is. `torch.nn.parallel.DistributedDataParallel` does not: it
    sums in the weights' dtype and refuses float32 gradients in its first backward pass.

    Args:
        parameters: ``model.named_parameters()``, or parameter groups whose "params" are
            (name, parameter) pairs.
        factory: makes the optimizer of the masters from parameter groups, such as
            ``functools.partial(torch.optim.AdamW, lr=1e-3)``.
        originals: parameter name to its values before rounding, as `AppliedPolicy` has them; the
            masters start from these. Without, they start from the rounded weights.
        moments: how state tensors shaped like their parameter are kept between steps, such as
            `BFloat16Moments()` or `BlockMoments()`; None: as the optimizer has them, in float32.
            The optimizer is then stepped a bundle of parameters at a time, so that its ``step`` is
            called several times a step, and ``state`` shows moments as they are kept.

    Raises:
        PrecisionError: parameters without names, or an original that is not what the weight was
            rounded from.
        NotAvailableError: moments are to be kept of an optimizer that couples parameters.
    """

    def __init__(
        self,
        parameters: NamedParameters | ParameterGroups,
        factory: OptimizerFactory,
        *,
        originals: Mapping[str, torch.Tensor] | None = None,
        moments: Moments | None = None,
    ) -> None:
        groups = named_groups(parameters)
        self._names = [name for group in groups for name, _ in group["params"]]
        self._weights = [weight for group in groups for _, weight in group["params"]]
        self._masters = [
            _master_of(name, weight, (originals or {}).get(name))
            for name, weight in zip(self._names, self._weights, strict=True)
        ]
        self._narrow = [i for i, w in enumerate(self._weights) if w is not self._masters[i]]
        self._inner = factory(self._groups_of_masters(groups))
        self._comparison = Comparison()
        self._one_pass: OnePass | None = None
        self._bundled: BundledStep | None = None
        self._name_of = dict(zip(self._masters, self._names, strict=True))
        if moments is not None:
            self._bundled = BundledStep(self._inner, self._name_of, moments)
        self._plan_pass()
        # What PyTorch's fused optimizers say of themselves: `step` takes heed of found_inf and
        # grad_scale, where a loss scaler has set them.
        self._step_supports_amp_scaling = moments is None and skips_by_itself(self._inner)
        self._sealed = False
        super().__init__(groups, self._inner.defaults)
        self._sealed = True
        copy_options(self._inner.param_groups, self.param_groups)
        for index in self._narrow:
            _check_no_gradient(self._names[index], self._weights[index])
            self._weights[index].grad_dtype = torch.float32

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the masters from the FP32 gradients and round them into the model.

        Raises:
            PrecisionError: a closure was given, or a gradient is not float32.
        """
        if closure is not None:
            raise NotAvailableError("MasterWeights.step takes no closure; call it without one")
        copy_options(self.param_groups, self._inner.param_groups)
        for index in self._narrow:
            self._masters[index].grad = self._gradient(index)
        scaling = {k: getattr(self, k) for k in ("found_inf", "grad_scale") if hasattr(self, k)}
        if self._one_pass is None or not self._one_pass.step(**scaling):
            self._take_over_changes()
            self._step_inner(scaling)
            self._publish()
        for index in self._narrow:
            self._masters[index].grad = None
        copy_options(self._inner.param_groups, self.param_groups)
        self._show_state()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state in torch's form, and the masters by name.

        Returns:
            "state" and "param_groups" as in torch, for the FP32 optimizer; "masters": name to
            float32 tensor, for the parameters whose master is not the weight itself. The tensors
            are the live ones, as in torch. Moments that are not kept in float32 are dicts with
            "format" and "codes", and "scales" and "block" where there are blocks; "updates" then
            counts the steps.
        """
        self._take_over_changes()
        copy_options(self.param_groups, self._inner.param_groups)
        masters = {self._names[i]: self._masters[i].detach() for i in self._narrow}
        source = self._inner if self._bundled is None else self._bundled
        return {**source.state_dict(), "masters": masters}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over moments, options and masters, and round the masters into the model.

        No step is run, so nothing else moves; model and optimizer may be loaded in either order.
        Moments may have been kept in another form; those of the own form are taken bit for bit.

        Raises:
            PrecisionError: masters or names do not fit; nothing is changed then.
        """
        masters = self._checked_masters(state_dict)
        inner = {key: value for key, value in state_dict.items() if key != "masters"}
        if self._bundled is not None:
            self._bundled.load_state_dict(inner)
        else:
            order = [n for group in inner["param_groups"] for n in group["params"]]
            names = dict(zip(self._masters, self._names, strict=True))
            plain, _ = unpack(inner, order, self._masters, names, None)
            groups = inner["param_groups"]
            self._inner.load_state_dict({"state": plain, "param_groups": groups})
        for index in self._narrow:
            self._masters[index].copy_(masters[self._names[index]])
        copy_options(self._inner.param_groups, self.param_groups)
        self._publish()
        self._show_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take on more parameters; their masters start from the weights as they are.

        Args:
            param_group: "params" are (name, parameter) pairs; options as of the optimizer.

        Raises:
            PrecisionError: names are missing or taken, a parameter is there already, or has a
                gradient in 16 bits; nothing is changed then.
        """
        if not self._sealed:
            super().add_param_group(param_group)
            return
        group = named_groups([param_group])[0]
        for name, weight in group["params"]:
            if name in self._names or any(weight is own for own in self._weights):
                raise PrecisionError(f"{name} is a parameter of this optimizer already")
            _check_no_gradient(name, weight)
        pairs = list(group["params"])
        masters = [_master_of(name, weight, None) for name, weight in pairs]
        named = [(name, own) for (name, _), own in zip(pairs, masters, strict=True)]
        self._inner.add_param_group({**group, "params": named})
        self._sealed = False
        super().add_param_group(group)
        self._sealed = True
        for (name, weight), master in zip(pairs, masters, strict=True):
            if master is not weight:
                self._narrow.append(len(self._names))
                weight.grad_dtype = torch.float32
            self._names.append(name)
            self._weights.append(weight)
            self._masters.append(master)
            self._name_of[master] = name
        copy_options(self._inner.param_groups[-1:], self.param_groups[-1:])
        self._plan_pass()

    def __reduce__(self) -> Never:
        raise PrecisionError("MasterWeights cannot be pickled or copied; keep its state_dict()")

    def _plan_pass(self) -> None:
        self._one_pass = None
        if self._bundled is None and OnePass.fits(self._inner, self._weights):
            held = self._inner, self._weights, self._masters
            self._one_pass = OnePass(*held, self._comparison)

    def _groups_of_masters(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        masters = iter(self._masters)
        return [
            {**group, "params": [(name, next(masters)) for name, _ in group["params"]]}
            for group in groups
        ]

    def _gradient(self, index: int) -> torch.Tensor | None:
        gradient: torch.Tensor | None = self._weights[index].grad
        master = self._masters[index]
        if gradient is not None and gradient.dtype != master.dtype:
            raise PrecisionError(
                f"the gradient of {self._names[index]} must be {master.dtype}, got "
                f"{gradient.dtype}; leave the parameter's grad_dtype as MasterWeights set it"
            )
        return gradient

    def _step_inner(self, scaling: dict[str, torch.Tensor | None]) -> None:
        if self._bundled is None:
            self._inner.__dict__.update(scaling)
            try:
                self._inner.step()
            finally:
                for name in scaling:
                    del self._inner.__dict__[name]
            return
        graded = [master for master in self._masters if master.grad is not None]
        self._bundled.step(graded, lambda bundle: None, lambda bundle: None)

    def _take_over_changes(self) -> None:
        """Where the model's weight is no longer the rounded master, take the weight."""
        for index in self._narrow:
            weight, master = self._weights[index].detach(), self._masters[index].detach()
            self._comparison.take_over(weight, master)

    def _publish(self) -> None:
        weights = [self._weights[i].detach() for i in self._narrow]
        if weights:
            torch._foreach_copy_(weights, [self._masters[i].detach() for i in self._narrow])

    def _show_state(self) -> None:
        # The same dicts under the model's parameters, for tools that look moments up there.
        self.state.clear()
        for weight, master in zip(self._weights, self._masters, strict=True):
            if master in self._inner.state and self._bundled is None:
                self.state[weight] = self._inner.state[master]
            elif master in self._inner.state and self._bundled is not None:
                self.state[weight] = self._bundled.shown(master)

    def _checked_masters(self, state_dict: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        if "masters" not in state_dict:
            raise PrecisionError(
                "the state must hold 'masters'; it seems to be a plain optimizer's, whose model "
                "can be loaded in float32 before MasterWeights is made of it"
            )
        groups = zip(state_dict["param_groups"], self._inner.param_groups, strict=False)
        for saved, own in groups:
            if saved.get("param_names", own["param_names"]) != own["param_names"]:
                raise PrecisionError(
                    f"the state is that of parameters {saved['param_names']}, "
                    f"but this optimizer has {own['param_names']}"
                )
        masters: Mapping[str, torch.Tensor] = state_dict["masters"]
        wanted = {self._names[i]: self._masters[i].shape for i in self._narrow}
        found = {name: master.shape for name, master in masters.items()}
        for name in wanted.keys() | found.keys():
            if wanted.get(name) != found.get(name):
                raise PrecisionError(
                    f"master of {name}: this optimizer has shape {_shape(wanted.get(name))}, "
                    f"the state {_shape(found.get(name))}"
                )
        return masters


def _master_of(name: str, weight: torch.Tensor, original: torch.Tensor | None) -> torch.Tensor:
    wide = torch.promote_types(weight.dtype, torch.float32)
    if wide == weight.dtype:
        return weight
    if original is None:
        return weight.detach().to(wide, copy=True).requires_grad_(weight.requires_grad)
    if original.shape != weight.shape or not torch.equal(original.to(weight.dtype), weight):
        raise PrecisionError(
            f"originals[{name!r}] does not round to the weight that the model has now; "
            "make MasterWeights right after the policy is applied"
        )
    return original.detach().to(wide).requires_grad_(weight.requires_grad)


def _check_no_gradient(name: str, weight: torch.Tensor) -> None:
    if weight.grad is not None and weight.dtype.itemsize < 4:
        raise PrecisionError(
            f"{name} already has a gradient in {weight.grad.dtype}; make MasterWeights before the "
            "first backward pass"
        )


def _shape(shape: torch.Size | None) -> str:
    return "none" if shape is None else str(tuple(shape))
