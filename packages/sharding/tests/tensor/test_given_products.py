"""Layers compute all three products by what they were given, whatever moves around these."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding import NotAvailableError
from trainwright.sharding.tensor import ColumnParallelLinear, Cut, RowParallelLinear
from trainwright.sharding.tensor import SequenceSharding as Sequence
from trainwright.sharding.tensor.conv1d import ColumnParallelConv1D, RowParallelConv1D
from trainwright.sharding.tensor.testing import BlockPlan, ParallelBlock, PlainBlock
from trainwright.sharding.testing import assert_close, load_plain_, mesh_of

LENGTH = 5
WAYS = {
    "off": None,
    "shards": Sequence.keeping_shards(length=LENGTH),
    "whole": Sequence.keeping_whole(length=LENGTH),
}


class Scaled:
    """Plain products times numbers of their own, so that one that is left out shows."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.told: list[tuple[torch.dtype, bool, bool]] = []

    def output(self, input: torch.Tensor, weight: torch.Tensor, **told: Any) -> torch.Tensor:
        assert input.shape[-1] == weight.shape[1]
        return 2 * self._note("output", input @ weight.t(), **told)

    def input_gradient(
        self, gradient: torch.Tensor, weight: torch.Tensor, **told: Any
    ) -> torch.Tensor:
        return 3 * self._note("input_gradient", gradient.to(weight) @ weight, **told)

    def weight_gradient(
        self, gradient: torch.Tensor, input: torch.Tensor, **told: Any
    ) -> torch.Tensor:
        rows = gradient.to(input).flatten(0, -2).t()
        return 5 * self._note("weight_gradient", rows @ input.flatten(0, -2), **told)

    def _note(
        self,
        name: str,
        result: torch.Tensor,
        *,
        dtype: torch.dtype,
        records: bool,
        kept: dict[str, Any] | None,
    ) -> torch.Tensor:
        self.calls[name] += 1
        self.told.append((dtype, records, kept is None))
        if kept is not None:
            assert (name == "output") == (not kept)  # one dict a forward
            kept[name] = True
        return result.to(dtype)


class Plainly(torch.autograd.Function):
    """What `Scaled` makes of a plain layer."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        return 2 * input @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        input, weight = ctx.saved_tensors
        own = gradient.flatten(0, -2).t() @ input.flatten(0, -2)
        return 3 * gradient @ weight, 5 * own


class PlainLayer(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = Plainly.apply(input, self.weight)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("enters", [True, False])
@pytest.mark.parametrize(("fused", "size"), [("none", 3), ("none", 4), ("group", 3), ("block", 2)])
def test_every_product_of_a_block_is_the_given_one(
    way: str, enters: bool, fused: str, size: int
) -> None:
    # Over 3 and 4 ranks key heads are shared: their gradients are terms of a sum.
    plan = BlockPlan(4, 2, fused=fused, p=0.0)
    plain = PlainBlock(plan)
    for layer in plain.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = PlainLayer
    input, upstream = drawn(2, LENGTH, plan.width), drawn(2, LENGTH, plan.width, seed=1)
    whole = input.clone().requires_grad_()
    expected = plain(whole)
    expected.backward(upstream)
    cut = Cut.whole(LENGTH, size) if way == "off" else Cut.uneven(LENGTH, size)

    def run(tp: Communicator) -> tuple[torch.Tensor, ...]:
        block = ParallelBlock(plan, tp, WAYS[way], enters)
        load_plain_(block, plain.state_dict(), mesh_of(tp))
        layers = [
            m for m in block.modules() if isinstance(getattr(m, "weight", None), nn.Parameter)
        ]
        given = {layer: Scaled() for layer in layers if hasattr(layer, "products")}
        for layer, products in given.items():
            layer.products = products
        own = cut.take(input, 1, tp.rank).clone().requires_grad_()
        output = block(own)
        output.backward(cut.take(upstream, 1, tp.rank))
        assert len(given) == (6 if fused == "none" else 4)
        for products in given.values():
            assert set(products.calls.values()) == {1}
            assert products.told == [(torch.float64, True, False)] * 3
        grad = own.grad
        assert grad is not None
        if fused == "none":
            for name in ("k", "v"):
                layer = block.get_submodule(name)
                if "tp" in layer.parameter_placements()["weight"].reduction_axes:
                    tp.all_reduce(layer.weight.grad).wait()
                    assert_close(
                        name,
                        layer.weight.grad,
                        plain.get_submodule(name).weight.grad,
                        terms=256,
                    )
        return output.detach(), grad

    results = LocalWorld(size).run(run)

    assert_close("output", cut.join([r[0] for r in results], 1), expected.detach(), terms=512)
    assert whole.grad is not None
    assert_close("input gradient", cut.join([r[1] for r in results], 1), whole.grad, terms=512)


@pytest.mark.parametrize("size", [1, 2])
def test_transposed_layers_multiply_all_of_their_blocks_at_once(size: int) -> None:
    weight, input = drawn(4, 12), drawn(3, 4, seed=1)
    cut = Cut.joined(*[Cut.even(4, size)] * 3)

    def run(tp: Communicator) -> None:
        layer = ColumnParallelConv1D(4, 12, tp, cut=cut, dtype=torch.float64)
        own = cut.take(weight, 1, tp.rank)
        with torch.no_grad():
            blocks = own.reshape(4, layer.num_blocks, -1).movedim(1, 0)
            layer.weight.copy_(blocks.reshape(layer.weight.shape))
        layer.products = products = Scaled()
        output = layer(input)
        output.sum().backward()
        assert set(products.calls.values()) == {1}
        assert_close("output", output.detach(), 2 * input @ own)
        expected = 5 * input.sum(0)[:, None].expand_as(own)
        found = layer.weight.grad
        assert found is not None
        rows = found if found.ndim == 2 else found.movedim(0, 1).flatten(1)
        assert_close("weight gradient", rows, expected)

        row = RowParallelConv1D(4, 6, tp, dtype=torch.float64)
        row.products = Scaled()
        with torch.no_grad():
            row.weight.fill_(1.0)
        part = row.cut.take(input, 1, tp.rank)
        assert_close("row", row(part).detach(), 2 * input.sum(1, keepdim=True).expand(3, 6))

    LocalWorld(size).run(run)


def test_a_forward_without_a_backward_keeps_and_records_nothing() -> None:
    def run(tp: Communicator) -> None:
        layer = ColumnParallelLinear(4, 6, tp, dtype=torch.float64)
        row = RowParallelLinear(4, 6, tp, reduce_output=False, dtype=torch.float64)
        layer.products, row.products = given = Scaled(), Scaled()
        with torch.no_grad():
            layer(drawn(3, 4))
            row(drawn(3, 2))
        layer.eval()(drawn(3, 4))

        assert given[0].told == [(torch.float64, False, True), (torch.float64, False, False)]
        assert given[1].told == [(torch.float64, False, True)]

    LocalWorld(2).run(run)


def test_autocast_chooses_the_output_and_gradients_have_the_dtypes_of_their_tensors() -> None:
    def run(tp: Communicator) -> None:
        layer = ColumnParallelLinear(4, 6, tp, bias=True)
        layer.products = products = Scaled()
        input = drawn(3, 4).float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            output = layer(input)
        output.sum().backward()
        assert output.dtype == torch.bfloat16
        assert [told[0] for told in products.told] == [torch.bfloat16] + [torch.float32] * 2

    LocalWorld(2).run(run)


def test_second_derivatives_of_given_products_are_refused() -> None:
    def run(tp: Communicator) -> None:
        for sequence in WAYS.values():
            layer = ColumnParallelLinear(4, 6, tp, sequence=sequence, dtype=torch.float64)
            layer.products = Scaled()
            here = LENGTH if sequence is None else Cut.uneven(LENGTH, 2).numel(tp.rank)
            input = drawn(2, here, 4).requires_grad_()
            with pytest.raises(NotAvailableError, match="second derivatives"):
                torch.autograd.grad(layer(input).sum(), input, create_graph=True)

    LocalWorld(2).run(run)
