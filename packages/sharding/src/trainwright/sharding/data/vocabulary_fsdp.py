"""PyTorch's FSDP and FSDP2: strategies, wrap policies and mixed precision, as a `ShardPolicy`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from trainwright.sharding.data.units import UnitRule, by_class, by_size, runs
from trainwright.sharding.data.vocabularies import (
    Draft,
    Translation,
    Word,
    notes,
    refuses,
    sets,
    shown,
    to_bool,
    translate,
)
from trainwright.sharding.errors import NotAvailableError, ShardingError

_WHOLE = {"stage": 0}
_CUT = {"stage": 3, "release_after_forward": True, "reduce_each_backward": True}
_KEPT = {**_CUT, "release_after_forward": False}
_STRATEGIES: dict[str, dict[str, Any]] = {
    "NO_SHARD": _WHOLE,
    "FULL_SHARD": _CUT,
    "SHARD_GRAD_OP": _KEPT,
    "HYBRID_SHARD": _CUT,
    "_HYBRID_SHARD_ZERO2": _KEPT,
}
_HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


def policy_from_fsdp(
    sharding_strategy: object = None, *, ranks_per_node: int | None = None, **settings: Any
) -> Translation:
    """Translate the arguments of ``FullyShardedDataParallel`` or ``fully_shard``.

    Objects of PyTorch and plain names are both taken; a wrap policy may also be a collection of
    module classes or a `UnitRule`.

    Args:
        sharding_strategy: A ``ShardingStrategy`` or its name; None is FULL_SHARD, as for FSDP2,
            which says ``reshard_after_forward`` instead.
        ranks_per_node: The ranks that a hybrid strategy cuts over; a two-dimensional
            ``device_mesh`` or ``mesh`` says it too.
        **settings: The other arguments, by their names.

    Raises:
        ShardingError: A setting is unknown or contradicts another.
        NotAvailableError: A setting asks for what this package does not have.
    """
    name = "FULL_SHARD" if sharding_strategy is None else _name_of(sharding_strategy)
    if name not in _STRATEGIES:
        raise ShardingError(
            f"sharding_strategy must be one of {', '.join(_STRATEGIES)}, got {name!r}"
        )
    draft = Draft(dict(_STRATEGIES[name]))
    if name != "NO_SHARD":
        draft.notes.append(
            "reduce_each_backward=True: as FSDP outside no_sync(); False is no_sync()"
        )
    if name in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"):
        draft.notes.append(
            f"{name}: weights are cut between steps too, as in FSDP; stage=2 keeps them whole and "
            "gathers once a step instead of once a forward"
        )
    if sharding_strategy is not None and settings.get("reshard_after_forward") is not None:
        raise ShardingError(
            "sharding_strategy is FSDP's word and reshard_after_forward FSDP2's; give one of them"
        )
    translate(draft, _WORDS, settings, "FSDP")
    _choose_hybrid(draft, name, ranks_per_node)
    return draft.finish()


def _choose_hybrid(draft: Draft, strategy: str, ranks_per_node: int | None) -> None:
    if ranks_per_node is not None:
        if strategy not in _HYBRID:
            raise ShardingError(
                f"ranks_per_node={ranks_per_node} goes with a hybrid strategy, got {strategy}"
            )
        if draft.mesh_changes.setdefault("dp_shard", ranks_per_node) != ranks_per_node:
            raise ShardingError(
                f"ranks_per_node={ranks_per_node} contradicts the device mesh, which cuts over "
                f"{draft.mesh_changes['dp_shard']} ranks"
            )
    if strategy in _HYBRID and "dp_shard" not in draft.mesh_changes:
        raise ShardingError(
            f"{strategy} cuts inside a node and replicates across: say ranks_per_node=8, or give a "
            "device_mesh of (nodes, ranks in a node)"
        )
    if strategy == "NO_SHARD" and "dp_shard" in draft.mesh_changes:
        raise ShardingError("NO_SHARD cuts nothing, but the device mesh has a dim to cut over")


def _reshard_after_forward(draft: Draft, key: str, value: Any) -> None:
    if value is not None and not isinstance(value, bool):
        raise NotAvailableError(
            f"{key}={value!r} (to a smaller group) is not available: True, False, or a hybrid "
            "mesh (MeshShape(dp_shard=...))"
        )
    draft.fields["release_after_forward"] = value is not False
    if value is None:
        draft.notes.append(f"{key}=None: the root unit is released after its forward like others")


def _mixed_precision(draft: Draft, key: str, value: Any) -> None:
    if value is None:
        return
    _check_has(
        ("param_dtype", "reduce_dtype"), "MixedPrecision or MixedPrecisionPolicy", key, value
    )
    if getattr(value, "keep_low_precision_grads", False):
        raise NotAvailableError(f"{key}: keep_low_precision_grads; pieces' gradients are float32")
    if getattr(value, "output_dtype", None) is not None:
        raise NotAvailableError(f"{key}: output_dtype; cast the outputs in the model's forward")
    dtype, reduced = value.param_dtype, value.reduce_dtype
    if reduced is not None:
        draft.fields["reduce_dtype"] = reduced
    elif dtype is not None and dtype != torch.float32:
        draft.notes.append(
            f"{key}: reduce_dtype=None reduces in float32 here, in {dtype} in FSDP; say "
            f"reduce_dtype={dtype} for that"
        )
    if getattr(value, "buffer_dtype", None) is not None:
        draft.notes.append(f"{key}: buffer_dtype: buffers stay as they are; convert them yourself")
    if dtype is None:
        return
    draft.fields["parameter_dtype"] = functools.partial(_always, dtype)
    if getattr(value, "cast_forward_inputs", False) or getattr(
        value, "cast_root_forward_inputs", False
    ):
        draft.notes.append(f"{key}: inputs are not cast; give them as {dtype} or use autocast")
    if getattr(value, "_module_classes_to_ignore", ()):
        draft.notes.append(
            f"{key}: normalisation weights get {dtype} too; a parameter_dtype of your own may "
            "leave some out by name"
        )


def _always(dtype: torch.dtype, name: str, parameter: nn.Parameter) -> torch.dtype:
    return dtype


def _wrap_policy(draft: Draft, key: str, value: Any) -> None:
    if value is None:
        return
    arguments: dict[str, Any] = {}
    policy = value
    if isinstance(value, functools.partial):
        policy, arguments = value.func, dict(value.keywords)
    kind = getattr(policy, "__name__", type(policy).__name__)
    if kind in _WRAP_POLICIES:
        draft.fields["units"] = _WRAP_POLICIES[kind](policy, arguments)
    elif isinstance(policy, type) and issubclass(policy, nn.Module):
        draft.fields["units"] = by_class(policy)
    elif isinstance(policy, Collection) and all(isinstance(c, type) for c in policy):
        draft.fields["units"] = by_class(*policy)
    elif callable(value) and _takes_name_and_module(value):
        draft.fields["units"] = value
    else:
        raise NotAvailableError(
            f"{key}={shown(value)} is no policy of torch.distributed.fsdp.wrap; give module "
            "classes or a UnitRule, (name, module) -> bool"
        )


def _takes_name_and_module(rule: Callable[..., Any]) -> bool:
    try:
        inspect.signature(rule).bind("name", None)
    except TypeError:
        return False
    return True


def _by_function(choose: Callable[[nn.Module], object]) -> UnitRule:
    def rule(name: str, module: nn.Module) -> bool:
        chosen = choose(module)
        if isinstance(chosen, dict) and chosen:
            raise NotAvailableError(
                f"the wrap policy gives {name} settings of its own ({', '.join(chosen)}); all "
                "units have one policy"
            )
        return bool(chosen)

    return rule


def _by_size(policy: object, arguments: dict[str, Any]) -> UnitRule:
    least = arguments.pop("min_num_params", int(1e8))
    if arguments:
        raise NotAvailableError(
            f"size_based_auto_wrap_policy with {', '.join(arguments)} is not available; give a "
            "UnitRule, (name, module) -> bool"
        )
    return by_size(int(least))


_WRAP_POLICIES: dict[str, Callable[[Any, dict[str, Any]], UnitRule]] = {
    "ModuleWrapPolicy": lambda policy, arguments: by_class(*policy._module_classes),
    "CustomPolicy": lambda policy, arguments: _by_function(policy._lambda_fn),
    "transformer_auto_wrap_policy": lambda policy, arguments: by_class(
        *arguments["transformer_layer_cls"]
    ),
    "_module_wrap_policy": lambda policy, arguments: by_class(*arguments["module_classes"]),
    "lambda_auto_wrap_policy": lambda policy, arguments: _by_function(arguments["lambda_fn"]),
    "size_based_auto_wrap_policy": _by_size,
    "always_wrap_policy": lambda policy, arguments: lambda name, module: runs(module),
}


def _device_mesh(draft: Draft, key: str, value: Any) -> None:
    if value is None:
        return
    _check_has(("shape",), "DeviceMesh", key, value)
    shape = tuple(value.shape)
    if len(shape) == 2:
        draft.mesh_changes["dp_shard"] = int(shape[1])
    elif len(shape) != 1:
        raise ShardingError(f"{key} must have one or two dims for FSDP, got shape {shape}")
    draft.notes.append(f"{key}: data_parallel takes a Mesh, which names every rank's place")


def _backward_prefetch(draft: Draft, key: str, value: Any) -> None:
    name = None if value is None else _name_of(value)
    if name not in (None, "BACKWARD_PRE", "BACKWARD_POST"):
        raise ShardingError(f"{key} must be BACKWARD_PRE, BACKWARD_POST or None, got {name!r}")
    draft.fields["live_units"] = 2 if name == "BACKWARD_PRE" else 1
    if name == "BACKWARD_POST":
        draft.notes.append(f"{key}=BACKWARD_POST: live_units=1, nothing is gathered ahead")


def _forward_prefetch(draft: Draft, key: str, value: Any) -> None:
    if to_bool(key, value):
        draft.fields["live_units"] = max(2, draft.fields.get("live_units", 2))
    draft.notes.append(f"{key}={value}: live_units bounds forward and backward alike")


def _check_has(attributes: Collection[str], kind: str, key: str, value: object) -> None:
    if not all(hasattr(value, attribute) for attribute in attributes):
        raise ShardingError(f"{key} must be a {kind}, got {shown(value)}")


def _name_of(value: object) -> str:
    name = getattr(value, "name", value)
    return name if isinstance(name, str) else repr(value)


def _offload(draft: Draft, key: str, value: Any) -> None:
    off = value is None or getattr(value, "offload_params", None) is False
    if not (off or value is False or type(value).__name__ == "OffloadPolicy"):
        raise NotAvailableError(f"{key}={shown(value)}: weights and states stay on the device")


def _ignored(draft: Draft, key: str, value: Any) -> None:
    if value is not None and list(value):
        raise NotAvailableError(
            f"{key} is not available: every parameter belongs to the DataParallel; freeze what is "
            "not to be trained, or keep it in a module of its own"
        )


_RANKS = "the ranks are those of the Mesh given to data_parallel"
_WORDS: dict[str, Word] = {
    "reshard_after_forward": _reshard_after_forward,
    "auto_wrap_policy": _wrap_policy,
    "mixed_precision": _mixed_precision,
    "mp_policy": _mixed_precision,
    "device_mesh": _device_mesh,
    "mesh": _device_mesh,
    "backward_prefetch": _backward_prefetch,
    "forward_prefetch": _forward_prefetch,
    "sync_module_states": sets("broadcast_weights", to_bool),
    "limit_all_gathers": notes("live_units always bounds what is gathered"),
    "use_orig_params": notes("names are always the plain module's, optimizers get pieces of each"),
    "param_init_fn": notes("give data_parallel(initialize=lambda name, module: fn(module))"),
    "device_id": notes("move the module before, or build it on the meta device", unless=(None,)),
    "process_group": notes(_RANKS, unless=(None,)),
    "dp_mesh_dims": notes(_RANKS, unless=(None,)),
    "cpu_offload": _offload,
    "offload_policy": _offload,
    "ignored_modules": _ignored,
    "ignored_states": _ignored,
    "ignored_params": _ignored,
    "shard_placement_fn": refuses("pieces are ranges of a unit's flat buffer", unless=(None,)),
}
