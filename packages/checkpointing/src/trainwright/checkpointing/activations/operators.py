"""Names of PyTorch's operators, as policies give them, and the operators that run under them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import attrs
import torch
from torch._ops import OpOverload, OpOverloadPacket

from trainwright.checkpointing.errors import PolicyError

# What functions of several operators come down to, by the name of the function.
_FAMILIES: dict[str, tuple[str, ...]] = {
    "matmul": ("mm", "bmm", "mv", "dot", "addmm", "baddbmm"),
    "linear": ("mm", "addmm", "bmm", "_scaled_mm", "mkldnn._linear_pointwise"),
    "scaled_dot_product_attention": (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    ),
    "conv1d": ("convolution",),
    "conv2d": ("convolution",),
    "conv3d": ("convolution",),
    "layer_norm": ("native_layer_norm",),
    "group_norm": ("native_group_norm",),
    "batch_norm": ("native_batch_norm", "cudnn_batch_norm"),
    "rms_norm": ("_fused_rms_norm", "rsqrt"),
    "softmax": ("_softmax",),
    "log_softmax": ("_log_softmax",),
    "einsum": ("bmm",),
}

#: Products of activations with weights: dear to run again, so selective policies keep them.
MATRIX_PRODUCTS: tuple[str, ...] = (
    "mm",
    "addmm",
    "_scaled_mm",
    "_grouped_mm",
    "mkldnn._linear_pointwise",
)


@attrs.frozen
class Operators:
    """The operators that one name in a policy stands for.

    Args:
        name: As it was given.
        overloads: Any of them.
    """

    name: str
    overloads: frozenset[OpOverload]


def operators_named(given: object) -> Operators:
    """Return what a name, an operator or an operator with all its overloads stands for.

    Args:
        given: ``"mm"``, ``"aten.mm"``, ``"aten::mm"``, ``"aten.mm.default"``, or
            ``torch.ops.aten.mm`` and ``torch.ops.aten.mm.default``; or a function that comes down
            to operators, as ``"matmul"``, ``torch.matmul`` or ``"linear"``.

    Raises:
        PolicyError: Nothing that runs has that name: it is unknown, a view, changes its arguments,
            or is made of others that are not known here.
    """
    if isinstance(given, OpOverload):
        return Operators(str(given), _checked(str(given), [given]))
    if isinstance(given, OpOverloadPacket):
        return _of_packet(str(given), given)
    if callable(given) and hasattr(given, "__name__"):
        return operators_named(given.__name__)
    if not isinstance(given, str):
        raise PolicyError(f"an operator is given by its name, such as 'mm', got {given!r}")
    space, name, overload = _parts(given)
    packet = getattr(getattr(torch.ops, space), name, None) if name else None
    if isinstance(packet, OpOverloadPacket):
        if not overload:
            return _of_packet(given, packet)
        if overload in packet.overloads():  # type: ignore[no-untyped-call]
            return Operators(given, _checked(given, [getattr(packet, overload)]))
    elif name in _FAMILIES and space == "aten" and not overload:
        return Operators(given, _of_family(name))
    raise PolicyError(f"there is no operator {given!r}{_nearest(name)}")


def products_with_weights() -> Operators:
    """Return `MATRIX_PRODUCTS`, those of them that this PyTorch has."""
    return Operators("products with weights", _found(MATRIX_PRODUCTS))


def named(rule: Iterable[object]) -> tuple[Operators, ...]:
    """Return what each entry of a list stands for."""
    if isinstance(rule, str):
        raise PolicyError(f"a list of operators is needed, got {rule!r}; write [{rule!r}]")
    return tuple(map(operators_named, rule))


def short_name(operator: OpOverload) -> str:
    """Return the name by which operators are counted: ``mm``, ``mul.Tensor``, ``my.op``."""
    text = str(operator).removeprefix("aten.")
    return text.removesuffix(".default")


def is_random(operator: OpOverload) -> bool:
    """Whether an operator may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def _of_packet(given: str, packet: OpOverloadPacket) -> Operators:
    name = str(packet).removeprefix("aten.")
    if str(packet).startswith("aten.") and name in _FAMILIES:
        return Operators(given, _of_family(name))
    overloads = _overloads(packet)
    running = [each for each in overloads if not _why_never(each)]
    return Operators(given, _checked(given, running or overloads))


def _of_family(name: str) -> frozenset[OpOverload]:
    return _found(_FAMILIES[name])


def _found(names: Iterable[str]) -> frozenset[OpOverload]:
    found: set[OpOverload] = set()
    for member in names:
        space, operator, _ = _parts(member)
        packet = getattr(getattr(torch.ops, space), operator, None)
        if isinstance(packet, OpOverloadPacket):
            found.update(each for each in _overloads(packet) if not _why_never(each))
    return frozenset(found)


def _checked(given: str, overloads: list[OpOverload]) -> frozenset[OpOverload]:
    reason = next(filter(None, map(_why_never, overloads)), None)
    if reason:
        raise PolicyError(f"operator {given!r} can never be kept: {reason}")
    return frozenset(overloads)


def _why_never(operator: OpOverload) -> str | None:
    if operator.is_view:
        return "it gives a view, which takes no bytes"
    if operator._schema.is_mutable:
        return "it changes its arguments, which must happen again in the recomputation"
    if operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return "it is made of other operators, which run in its place; name those"
    return None


def _parts(text: str) -> tuple[str, str, str]:
    """Split a name into namespace, operator and overload."""
    pieces = text.removeprefix("torch.ops.").removeprefix("torch.").replace("::", ".").split(".")
    if len(pieces) == 1:
        return "aten", pieces[0], ""
    if len(pieces) == 2:
        known = pieces[0] == "aten" or not hasattr(torch.ops.aten, pieces[0])
        return (pieces[0], pieces[1], "") if known else ("aten", pieces[0], pieces[1])
    if len(pieces) == 3:
        return pieces[0], pieces[1], pieces[2]
    return "aten", "", ""


def _overloads(packet: OpOverloadPacket) -> list[OpOverload]:
    names: list[str] = packet.overloads()  # type: ignore[no-untyped-call]
    # Some that are listed are not operators of tensors, and cannot run.
    found = (_overload(packet, name) for name in names)
    return [each for each in found if each is not None]


def _overload(packet: OpOverloadPacket, name: str) -> OpOverload | None:
    try:
        overload: OpOverload = getattr(packet, name)
        _why_never(overload)
    except (AttributeError, RuntimeError):
        return None
    return overload


def _nearest(name: str) -> str:
    known = {full.split("::")[1].split(".")[0] for full in torch._C._dispatch_get_all_op_names()}
    near = difflib.get_close_matches(name, [*sorted(known), *_FAMILIES], n=3)
    return f"; did you mean {', '.join(near)}?" if near else ""
