"""Settings of FSDP become a policy, a note with the reason, or an error."""

from __future__ import annotations

import functools
from typing import Any

import attrs
import pytest
import torch
from torch import nn

from trainwright.collectives import LocalWorld
from trainwright.sharding import Mesh, MeshShape, NotAvailableError, ShardingError
from trainwright.sharding.data import (
    ShardPolicy,
    data_parallel,
    policy_from_fsdp,
)
from trainwright.sharding.data.units import by_class, plan_units

TRANSLATED: dict[str, dict[str, Any]] = {
    "NO_SHARD": {"stage": 0},
    "FULL_SHARD": {"stage": 3, "release_after_forward": True, "reduce_each_backward": True},
    "SHARD_GRAD_OP": {"stage": 3, "release_after_forward": False, "reduce_each_backward": True},
}


class Block(nn.Module):
    """A layer of a model that wrap policies choose."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(inputs)
        return outputs


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), Block(), Block(), nn.Linear(4, 2))


def unit_names(policy: ShardPolicy) -> list[str]:
    return [unit.name for unit in plan_units(model(), policy.units)]


@pytest.mark.parametrize(("strategy", "fields"), TRANSLATED.items())
def test_a_strategy_of_fsdp_is_a_stage(strategy: str, fields: dict[str, Any]) -> None:
    from torch.distributed.fsdp import ShardingStrategy

    by_name = policy_from_fsdp(strategy)

    assert by_name.policy == ShardPolicy(**fields)
    assert by_name.mesh_changes == {}
    assert policy_from_fsdp(ShardingStrategy[strategy]) == by_name


@pytest.mark.parametrize(
    ("strategy", "released"), [("HYBRID_SHARD", True), ("_HYBRID_SHARD_ZERO2", False)]
)
def test_a_hybrid_strategy_cuts_inside_nodes_and_says_so_to_the_mesh(
    strategy: str, released: bool
) -> None:
    from torch.distributed.fsdp import ShardingStrategy

    found = policy_from_fsdp(getattr(ShardingStrategy, strategy), ranks_per_node=4)

    assert (found.policy.stage, found.policy.release_after_forward) == (3, released)
    assert found.mesh_changes == {"dp_shard": 4}
    shape = attrs.evolve(MeshShape(dp=8), **found.mesh_changes)
    assert (shape.size("dp_shard"), shape.size("dp_replicate")) == (4, 2)


def test_no_strategy_is_full_shard() -> None:
    assert policy_from_fsdp() == policy_from_fsdp("FULL_SHARD")


@attrs.frozen
class DeviceMesh:
    """What is read of PyTorch's, which needs process groups."""

    shape: tuple[int, ...]


def test_a_device_mesh_of_two_dims_is_a_hybrid() -> None:
    assert policy_from_fsdp(mesh=DeviceMesh((2, 8))).mesh_changes == {"dp_shard": 8}
    assert policy_from_fsdp(device_mesh=DeviceMesh((8,))).mesh_changes == {}
    assert policy_from_fsdp(
        "HYBRID_SHARD", device_mesh=DeviceMesh((2, 8)), ranks_per_node=8
    ).mesh_changes == {"dp_shard": 8}


@pytest.mark.parametrize(("resharded", "released"), [(True, True), (None, True), (False, False)])
def test_fsdp2_says_with_reshard_after_forward_whether_weights_are_released(
    resharded: bool | None, released: bool
) -> None:
    found = policy_from_fsdp(reshard_after_forward=resharded)

    assert (found.policy.stage, found.policy.release_after_forward) == (3, released)
    assert any("reshard_after_forward=None" in note for note in found.notes) == (resharded is None)


def wrap_policies() -> list[Any]:
    from torch.distributed.fsdp import wrap

    return [
        wrap.ModuleWrapPolicy({Block}),
        wrap.CustomPolicy(lambda module: isinstance(module, Block)),
        functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        functools.partial(
            wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Block)
        ),
        Block,
        [Block],
        {Block},
        by_class(Block),
    ]


@pytest.mark.parametrize("number", range(8))
def test_a_wrap_policy_chooses_the_units_that_fsdp_would_wrap(number: int) -> None:
    found = policy_from_fsdp(auto_wrap_policy=wrap_policies()[number])

    assert unit_names(found.policy) == ["", "1", "2"]


def test_wrap_policies_by_size_and_always_choose_as_fsdp_does() -> None:
    from torch.distributed.fsdp import wrap

    sized = functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=15)
    always = wrap.always_wrap_policy

    assert unit_names(policy_from_fsdp(auto_wrap_policy=sized).policy) == ["", "1.inner", "2.inner"]
    default = policy_from_fsdp(auto_wrap_policy=wrap.size_based_auto_wrap_policy)
    assert unit_names(default.policy) == [""]
    assert unit_names(policy_from_fsdp(auto_wrap_policy=always).policy) == [
        "0",
        "1.inner",
        "2.inner",
        "3",
    ]
    assert policy_from_fsdp(auto_wrap_policy=None).policy.units is None


@pytest.mark.parametrize("key", ["mixed_precision", "mp_policy"])
def test_mixed_precision_gives_the_dtypes_of_weights_and_reductions(key: str) -> None:
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    kind = MixedPrecision if key == "mixed_precision" else MixedPrecisionPolicy
    low = kind(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)

    found = policy_from_fsdp(**{key: low}).policy

    assert found.parameter_dtype is not None
    assert found.parameter_dtype("w", nn.Parameter(torch.ones(1))) == torch.bfloat16
    assert found.reduce_dtype == torch.float16
    assert policy_from_fsdp(**{key: kind()}).policy.parameter_dtype is None
    assert policy_from_fsdp(**{key: None}).policy == policy_from_fsdp().policy


def test_reductions_stay_in_float32_where_fsdp_would_lower_them_and_a_note_says_so() -> None:
    from torch.distributed.fsdp import MixedPrecision

    found = policy_from_fsdp(
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    )

    assert found.policy.reduce_dtype is None
    for part in ("reduces in float32 here", "buffers stay", "inputs are not cast", "normalisation"):
        assert any(part in note for note in found.notes)


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"backward_prefetch": "BACKWARD_PRE"}, {"live_units": 2}),
        ({"backward_prefetch": "BACKWARD_POST"}, {"live_units": 1}),
        ({"backward_prefetch": None}, {"live_units": 1}),
        ({"backward_prefetch": None, "forward_prefetch": True}, {"live_units": 2}),
        ({"sync_module_states": False}, {"broadcast_weights": False}),
        ({"sync_module_states": True}, {"broadcast_weights": True}),
    ],
)
def test_further_settings_of_fsdp_are_fields_of_the_policy(
    settings: dict[str, Any], fields: dict[str, Any]
) -> None:
    found = policy_from_fsdp(**settings).policy

    assert found == attrs.evolve(policy_from_fsdp().policy, **fields)


@pytest.mark.parametrize(
    "settings",
    [
        {"limit_all_gathers": False},
        {"use_orig_params": True},
        {"param_init_fn": print},
        {"device_id": 0},
        {"process_group": object()},
        {"forward_prefetch": False},
        {"device_mesh": DeviceMesh((4,))},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_has_no_counterpart_is_noted_by_name(settings: dict[str, Any]) -> None:
    (name,) = settings

    found = policy_from_fsdp(**settings)

    assert any(note.startswith(name) for note in found.notes)


def test_settings_of_fsdp_that_ask_for_nothing_leave_no_trace() -> None:
    from torch.distributed.fsdp import CPUOffload, OffloadPolicy

    found = policy_from_fsdp(
        cpu_offload=CPUOffload(offload_params=False),
        offload_policy=OffloadPolicy(),
        ignored_modules=[],
        ignored_states=None,
        ignored_params=set(),
        shard_placement_fn=None,
        process_group=None,
        device_id=None,
        device_mesh=None,
        dp_mesh_dims=None,
    )

    assert found == policy_from_fsdp()


def own_settings(module: nn.Module) -> Any:
    return {"sharding_strategy": "NO_SHARD"} if isinstance(module, Block) else False


def fsdp_refusals() -> list[tuple[dict[str, Any], str]]:
    from torch.distributed.fsdp import (
        CPUOffload,
        CPUOffloadPolicy,
        MixedPrecision,
        MixedPrecisionPolicy,
        wrap,
    )

    sized = functools.partial(wrap.size_based_auto_wrap_policy, force_leaf_modules={Block})
    return [
        ({"cpu_offload": CPUOffload(offload_params=True)}, "stay on the device"),
        ({"cpu_offload": True}, "stay on the device"),
        ({"offload_policy": CPUOffloadPolicy()}, "stay on the device"),
        ({"ignored_modules": [Block()]}, "every parameter belongs to the DataParallel"),
        ({"shard_placement_fn": print}, "ranges of a unit's flat buffer"),
        ({"reshard_after_forward": 4}, "True, False, or a hybrid mesh"),
        ({"auto_wrap_policy": sized}, "with force_leaf_modules is not available"),
        ({"auto_wrap_policy": lambda module, recurse, numel: True}, "give module classes or a"),
        ({"auto_wrap_policy": 3}, "give module classes or a UnitRule"),
        ({"mp_policy": MixedPrecisionPolicy(output_dtype=torch.float32)}, "cast the outputs"),
        ({"mixed_precision": MixedPrecision(keep_low_precision_grads=True)}, "are float32"),
    ]


@pytest.mark.parametrize("number", range(11))
def test_what_fsdp_has_and_we_have_not_is_refused_with_a_way_out(number: int) -> None:
    settings, message = fsdp_refusals()[number]

    with pytest.raises(NotAvailableError, match=message):
        policy_from_fsdp(**settings)


def test_a_wrap_policy_with_settings_for_some_modules_is_refused_when_it_is_asked() -> None:
    from torch.distributed.fsdp import wrap

    found = policy_from_fsdp(auto_wrap_policy=wrap.CustomPolicy(own_settings))

    with pytest.raises(NotAvailableError, match="gives 1 settings of its own"):
        unit_names(found.policy)


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (("FULL_SHRAD",), {}, "must be one of NO_SHARD, FULL_SHARD"),
        ((), {"sharding_startegy": 1}, "no setting 'sharding_startegy'"),
        ((), {"auto_wrap_polcy": None}, "did you mean 'auto_wrap_policy'"),
        (("HYBRID_SHARD",), {}, "say ranks_per_node=8"),
        (("FULL_SHARD",), {"ranks_per_node": 8}, "goes with a hybrid strategy"),
        (
            ("HYBRID_SHARD",),
            {"ranks_per_node": 4, "device_mesh": DeviceMesh((2, 8))},
            "contradicts the device mesh",
        ),
        (("NO_SHARD",), {"device_mesh": DeviceMesh((2, 8))}, "NO_SHARD cuts nothing"),
        ((), {"mesh": DeviceMesh((2, 2, 2))}, "one or two dims"),
        (("FULL_SHARD",), {"reshard_after_forward": False}, "give one of them"),
        ((), {"backward_prefetch": "BEFORE"}, "must be BACKWARD_PRE"),
        ((), {"sync_module_states": 1}, "sync_module_states must be true or false"),
        ((), {"mp_policy": torch.bfloat16}, "mp_policy must be a MixedPrecision or .*bfloat16"),
        ((), {"mesh": 8}, "mesh must be a DeviceMesh, got 8"),
    ],
)
def test_settings_of_fsdp_that_make_no_sense_are_refused(
    arguments: tuple[Any, ...], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ShardingError, match=message):
        policy_from_fsdp(*arguments, **settings)


@pytest.mark.parametrize("strategy", ["NO_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"])
def test_a_translated_policy_trains(strategy: str) -> None:
    found = policy_from_fsdp(
        strategy,
        auto_wrap_policy={Block},
        ranks_per_node=2 if strategy == "HYBRID_SHARD" else None,
    )
    inputs = torch.ones(1, 2, dtype=torch.float64)
    plain = model().double()
    weights = {name: value.clone() for name, value in plain.state_dict().items()}
    (plain(inputs).sum() * 10).backward()

    def run(comm: Any) -> dict[str, torch.Tensor]:
        ours = model().double()
        ours.load_state_dict(weights)
        mesh = Mesh(comm, attrs.evolve(MeshShape(dp=4), **found.mesh_changes))
        parallel = data_parallel(ours, mesh, found.policy)
        parallel.last_backward()
        (ours(inputs).sum() * (comm.rank + 1)).backward()
        parallel.reduce()
        parallel.wait()
        whole = {name: torch.zeros_like(value) for name, value in weights.items()}
        for name, piece in parallel.pieces.items():
            if all(mesh.coordinate(axis) == 0 for axis in piece.spec.replicated):
                assert piece.parameter.grad is not None
                piece.spec.insert(piece.parameter.grad, whole[name])
        return whole

    ranks = LocalWorld(4).run(run)

    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(sum(rank[name] for rank in ranks), parameter.grad)
