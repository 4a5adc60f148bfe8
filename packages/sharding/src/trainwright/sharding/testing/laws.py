"""Laws of parallel modules: the parts tile the whole, and all ranks compute the plain module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import torch
from torch import nn

from trainwright.collectives import Communicator, LocalWorld, ShardSpec
from trainwright.sharding.mesh.mesh import Mesh
from trainwright.sharding.mesh.shape import MeshShape
from trainwright.sharding.placement.parameters import placements_of, shard_spec


def mesh_of(tp: Communicator) -> Mesh:
    """Return the mesh in which a communicator's ranks are all tensor-parallel."""
    return Mesh(tp, MeshShape(tp=tp.size))


def load_plain_(model: nn.Module, state: Mapping[str, torch.Tensor], mesh: Mesh) -> None:
    """Fill a parallel model with this rank's parts of the plain model's parameters."""
    placements = placements_of(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spec = shard_spec(name, placements[name], mesh)
            parameter.copy_(spec.extract(state[name]).view(parameter.shape))


def assert_close(
    name: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    terms: int = 64,
    scale: float = 0.0,
) -> None:
    """Raise unless two tensors agree as sums of ``terms`` rounded products would.

    The bound is terms * eps of the largest magnitude: each of the terms, and each addition of one,
    rounds once.

    Args:
        name: For the message.
        actual: Computed in parallel.
        expected: Computed in one process.
        terms: Length of the longest sum behind an element.
        scale: Magnitude of the terms, where they cancel to something smaller.
    """
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    bound = terms * torch.finfo(actual.dtype).eps * max(largest, scale)
    assert actual.shape == expected.shape, f"{name}: {actual.shape} is not {expected.shape}"
    torch.testing.assert_close(
        actual, expected.to(actual.dtype), rtol=0.0, atol=bound, msg=lambda m: f"{name}: {m}"
    )


def check_pieces_tile_the_parameters(build: Callable[[Communicator], nn.Module], size: int) -> None:
    """Law: over the ranks, the counted parts of each parameter hold each element exactly once.

    Args:
        build: Makes the module of one tensor-parallel rank.
        size: Number of ranks.
    """

    def specs_of(tp: Communicator) -> list[tuple[ShardSpec, bool]]:
        mesh = mesh_of(tp)
        placements = placements_of(build(tp))
        specs = [shard_spec(name, placement, mesh) for name, placement in placements.items()]
        return [
            (spec, all(mesh.coordinate(axis) == 0 for axis in spec.replicated)) for spec in specs
        ]

    by_rank: list[list[tuple[ShardSpec, bool]]] = LocalWorld(size).run(specs_of)
    for parts in zip(*by_rank, strict=True):
        first = parts[0][0]
        held = torch.zeros(first.global_shape, dtype=torch.int64)
        for spec, counts in parts:
            assert spec.name == first.name
            assert spec.global_shape == first.global_shape
            held += _ones_at(spec) if counts else 0
        assert bool((held == 1).all()), f"{first.name}: elements are held {held.tolist()} times"


@attrs.frozen(eq=False)
class _Run:
    output: torch.Tensor
    input_gradient: torch.Tensor | None
    gradients: dict[str, torch.Tensor]
    specs: dict[str, ShardSpec]


def check_computes_the_plain_module(
    build: Callable[[Communicator], nn.Module],
    plain: nn.Module,
    input: torch.Tensor,
    size: int,
    *,
    input_dim: int | None = None,
    output_dim: int | None = None,
) -> None:
    """Law: outputs and all gradients are those of the plain module, in the same dtype.

    Args:
        build: Makes the module of one tensor-parallel rank; its parameters have the plain names.
        plain: The module in one process.
        input: The whole input.
        size: Number of ranks.
        input_dim: The dim along which the ranks' inputs are cut; None where it is replicated.
        output_dim: The dim along which the ranks' outputs are cut; None where it is replicated.
    """
    generator = torch.Generator().manual_seed(size)
    whole = plain(input)
    upstream = torch.randn(whole.shape, generator=generator, dtype=torch.float64).to(whole.dtype)

    def run(tp: Communicator) -> _Run:
        mesh = mesh_of(tp)
        module = build(tp)
        load_plain_(module, plain.state_dict(), mesh)
        output, gradient = _forward_backward(
            module, _part(input, input_dim, tp), _part(upstream, output_dim, tp)
        )
        placements = placements_of(module)
        specs = {name: shard_spec(name, placements[name], mesh) for name in placements}
        return _Run(output, gradient, _gradients(module), specs)

    runs: list[_Run] = LocalWorld(size).run(run)
    expected_output, expected_gradient = _forward_backward(plain, input, upstream)
    terms = 8 * max(input.numel(), whole.numel(), 8)
    scale = float(upstream.abs().max()) * max(1.0, float(input.abs().max()))

    def compare(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        assert_close(name, actual, expected, terms=terms, scale=scale)

    compare("output", _joined([r.output for r in runs], output_dim), expected_output)
    for result in runs:
        for name, gradient in _gradients(plain).items():
            actual = result.gradients[name]
            # Several boxes, or none, come flat.
            expected = result.specs[name].extract(gradient).view(actual.shape)
            compare(f"gradient of {name}", actual, expected)
    if expected_gradient is not None:
        found = [r.input_gradient for r in runs if r.input_gradient is not None]
        compare("gradient of input", _joined(found, input_dim), expected_gradient)


def _forward_backward(
    module: nn.Module, input: torch.Tensor, upstream: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    module.zero_grad()
    own = input.detach().clone()
    if own.is_floating_point():
        own.requires_grad_()
    output: torch.Tensor = module(own)
    output.backward(upstream)  # type: ignore[no-untyped-call]
    return output.detach(), own.grad


def _gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def _part(whole: torch.Tensor, dim: int | None, tp: Communicator) -> torch.Tensor:
    return whole if dim is None else whole.chunk(tp.size, dim)[tp.rank]


def _joined(parts: Sequence[torch.Tensor], dim: int | None) -> torch.Tensor:
    if dim is not None:
        return torch.cat(list(parts), dim)
    for part in parts:
        assert torch.equal(part, parts[0]), "a replicated tensor differs between ranks"
    return parts[0]


def _ones_at(spec: ShardSpec) -> torch.Tensor:
    ones = torch.zeros(spec.global_shape, dtype=torch.int64)
    spec.insert(torch.ones(spec.numel, dtype=torch.int64), ones)
    return ones
