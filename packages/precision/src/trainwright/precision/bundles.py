"""Stepping an optimizer over a few of its parameters at a time.

What a step needs in float32 (moments that are kept in fewer bits, weights that have no master)
exists for one bundle of parameters only, in memory that the next bundle uses again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from trainwright.precision.errors import NotAvailableError, PrecisionError
from trainwright.precision.moments import (
    Dither,
    Kept,
    Moments,
    Place,
    check_kept,
    decode_moment,
)

BUNDLE_NUMEL = 1 << 20
_COUPLING = ("LBFGS", "SparseAdam")
Visit = Callable[[Sequence[torch.Tensor]], None]


class Scratch:
    """Float32 memory that is handed out from its beginning again for every bundle."""

    def __init__(self) -> None:
        self._memory: dict[torch.device, torch.Tensor] = {}
        self._used: dict[torch.device, int] = {}

    def reserve(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take back all that was handed out, and hold enough for tensors of these shapes."""
        self._used = {}
        wanted: dict[torch.device, int] = {}
        for tensor in tensors:
            wanted[tensor.device] = wanted.get(tensor.device, 0) + tensor.numel()
        for device, numel in wanted.items():
            if device not in self._memory or self._memory[device].numel() < numel:
                self._memory.pop(device, None)
                self._memory[device] = torch.empty(numel, device=device)

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Return contiguous memory, not yet set, for one of them."""
        first = self._used.get(like.device, 0)
        self._used[like.device] = first + like.numel()
        return self._memory[like.device][first : first + like.numel()].view(like.shape)


class BundledStep:
    """Steps an optimizer bundle by bundle, its moments kept in fewer bits in between.

    Args:
        inner: any optimizer that updates each parameter from its own gradient and state.
        names: of its parameters.
        moments: the form of what is kept; None: moments stay as the optimizer has them.

    Raises:
        NotAvailableError: the optimizer's step couples its parameters.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        names: Mapping[torch.Tensor, str],
        moments: Moments | None,
    ) -> None:
        if type(inner).__name__ in _COUPLING:
            raise NotAvailableError(
                f"{type(inner).__name__} is not available here: its step is not one of each "
                "parameter alone; use MasterWeights without moments, or another optimizer"
            )
        self.updates = 0
        self._inner = inner
        self._names = names
        self._moments = moments
        self._kept: dict[torch.Tensor, dict[str, Kept]] = {}
        self._dither: dict[torch.device, Dither] = {}
        self._scratch = Scratch()
        for parameter in list(inner.state):
            self._keep(parameter)

    def step(self, parameters: Sequence[torch.Tensor], before: Visit, after: Visit) -> None:
        """Step these parameters once, ``before`` and ``after`` being called with each bundle.

        Raises:
            NotAvailableError: the optimizer wrote into its groups, as one that couples parameters
                does, and there are more bundles than one.
        """
        groups = self._inner.param_groups
        whole = [group["params"] for group in groups]
        group_of = {p: number for number, params in enumerate(whole) for p in params}
        bundles = list(_cut(parameters))
        options = [_options(group) for group in groups]
        try:
            for bundle in bundles:
                for number, group in enumerate(groups):
                    group["params"] = [p for p in bundle if group_of[p] == number]
                self._inner.param_groups = [group for group in groups if group["params"]]
                self._step_bundle(bundle, before, after)
                if len(bundles) > 1 and not _are_same(options, groups):
                    raise NotAvailableError(
                        f"{type(self._inner).__name__} changes its options as it steps, so that "
                        "it cannot be stepped a few parameters at a time; use MasterWeights "
                        "without moments"
                    )
        finally:
            self._inner.param_groups = groups
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params
        self.updates += 1

    def shown(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return a parameter's state, as between steps: what is kept, as it is kept."""
        found = dict(self._inner.state[parameter]) if parameter in self._inner.state else {}
        return {**found, **self._kept.get(parameter, {})}

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state in torch's form, moments as they are kept."""
        packed = self._inner.state_dict()
        found = {n: self.shown(p) for n, p in enumerate(self._parameters())}
        state = {n: entries for n, entries in found.items() if entries}
        return {**packed, "state": state, "updates": self.updates}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state with moments in any form, the own one bit for bit.

        Raises:
            PrecisionError: a moment is not one of its parameter; nothing is changed then.
        """
        parameters = self._parameters()
        order = [n for group in state_dict["param_groups"] for n in group["params"]]
        plain, own = unpack(state_dict, order, parameters, self._names, self._moments)
        self._inner.load_state_dict({"state": plain, "param_groups": state_dict["param_groups"]})
        self.updates = int(state_dict.get("updates", 0))
        self._kept = {}
        for parameter in parameters:
            self._keep(parameter)
        for number, kept in own.items():
            parameter = parameters[number]
            moved = {key: _clone(entry, parameter.device) for key, entry in kept.items()}
            self._kept.setdefault(parameter, {}).update(moved)

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self._inner.param_groups for p in group["params"]]

    def _step_bundle(self, bundle: Sequence[torch.Tensor], before: Visit, after: Visit) -> None:
        opened = [(p, key) for p in bundle for key in self._kept.get(p, {})]
        self._scratch.reserve([p for p, _ in opened])
        try:
            before(bundle)
            for parameter, key in opened:
                moment = self._scratch.take(parameter)
                decode_moment(self._kept[parameter][key], moment)
                self._inner.state[parameter][key] = moment
            self._inner.step()
            for parameter in bundle:
                self._keep(parameter)
            after(bundle)
        finally:
            for parameter, key in opened:
                self._inner.state[parameter].pop(key, None)

    def _keep(self, parameter: torch.Tensor) -> None:
        """Move a parameter's moments out of the optimizer's state."""
        if self._moments is None or parameter not in self._inner.state:
            return
        state = self._inner.state[parameter]
        for key, value in list(state.items()):
            if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                continue
            if value.dtype is not torch.float32 or not self._moments.keeps(value):
                continue
            if value.device not in self._dither:
                self._dither[value.device] = Dither(value.device)
            place = Place(self._names[parameter], key, self.updates)
            kept = self._moments.encode(value, self._dither[value.device], place)
            self._kept.setdefault(parameter, {})[key] = kept
            del state[key]


def unpack(
    state_dict: Mapping[str, Any],
    order: Sequence[Any],
    parameters: Sequence[torch.Tensor],
    names: Mapping[torch.Tensor, str],
    moments: Moments | None,
) -> tuple[dict[Any, dict[str, Any]], dict[int, dict[str, Kept]]]:
    """Return a state without kept moments, and those of the form of ``moments`` by position.

    Moments that are kept in another form are float32 tensors in the first.
    """
    plain: dict[Any, dict[str, Any]] = {}
    own: dict[int, dict[str, Kept]] = {}
    for number, (name, parameter) in enumerate(zip(order, parameters, strict=False)):
        if name not in state_dict["state"]:
            continue
        plain[name] = {}
        for key, value in state_dict["state"][name].items():
            if not (isinstance(value, Mapping) and "codes" in value):
                plain[name][key] = value
                continue
            check_kept(names[parameter], key, value, parameter.shape)
            if moments is not None and moments.has_form(value):
                own.setdefault(number, {})[key] = dict(value)
            else:
                plain[name][key] = torch.empty(value["codes"].shape, device=value["codes"].device)
                decode_moment(value, plain[name][key])
    if len(order) != len(parameters):
        raise PrecisionError(
            f"the state is that of {len(order)} parameters, this optimizer has {len(parameters)}"
        )
    return plain, own


def _cut(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bundle: list[torch.Tensor] = []
    held = 0
    for parameter in parameters:
        if bundle and held + parameter.numel() > BUNDLE_NUMEL:
            yield bundle
            bundle, held = [], 0
        bundle.append(parameter)
        held += parameter.numel()
    if bundle:
        yield bundle


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _are_same(before: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no option has been put in the place of another."""
    return all(
        old.keys() == new.keys() and all(old[key] is new[key] for key in new)
        for old, new in zip(before, map(_options, groups), strict=True)
    )


def _clone(kept: Kept, device: torch.device) -> Kept:
    return {
        key: value.to(device, copy=True) if isinstance(value, torch.Tensor) else value
        for key, value in kept.items()
    }
