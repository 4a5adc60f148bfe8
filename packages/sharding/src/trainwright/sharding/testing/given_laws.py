"""Laws of what layers and policies are given: products, and codecs of weights."""

# Shapes: M tokens, I in_features, O out_features.

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainwright.sharding.protocol import Products, WeightCodec


def check_products(make: Callable[[], Products], sizes: tuple[int, int, int]) -> None:
    """Law: three products of the right shapes and dtypes, the same when a forward is run again.

    Args:
        make: Makes them anew, for a layer of these sizes that is not cut.
        sizes: M, I and O.
    """
    num_tokens, inputs, outputs = sizes
    generator = torch.Generator().manual_seed(0)
    input_MI, weight_OI, gradient_MO = (
        torch.randn(shape, generator=generator)
        for shape in ((num_tokens, inputs), (outputs, inputs), (num_tokens, outputs))
    )
    for dtype, records in itertools.product((torch.float32, torch.bfloat16), (True, False)):
        products, kept = make(), dict[str, Any]()
        told: dict[str, Any] = {"dtype": dtype, "records": records, "kept": kept}
        first = products.output(input_MI, weight_OI, **told)
        results = (
            first,
            products.input_gradient(gradient_MO, weight_OI, **told),
            products.weight_gradient(gradient_MO, input_MI, **told),
        )
        plain = (input_MI @ weight_OI.t(), gradient_MO @ weight_OI, gradient_MO.t() @ input_MI)
        for result, expected in zip(results, plain, strict=True):
            assert (result.shape, result.dtype) == (expected.shape, dtype)
        again = products.output(input_MI, weight_OI, **{**told, "kept": {}})
        assert torch.equal(first, again), "a forward that is run again gives the same"
        alone = products.output(input_MI, weight_OI, dtype=dtype, records=False, kept=None)
        assert torch.equal(first, alone), "a forward without a backward gives the same"
        leading = products.output(
            input_MI.unsqueeze(0), weight_OI, dtype=dtype, records=False, kept=None
        )
        assert torch.equal(first, leading[0]), "leading dims are tokens"


def check_weight_codec(codec: WeightCodec, whole: torch.Tensor, edges: Sequence[int]) -> None:
    """Law: parts of a flat weight are measured, encoded and decoded as the whole is.

    Args:
        codec: The codec.
        whole: A flat weight.
        edges: Where it is cut, in order; parts may be empty.
    """
    bounds = [0, *edges, whole.numel()]
    parts = [whole[start:stop] for start, stop in itertools.pairwise(bounds)]
    measured = codec.measure(whole)
    assert (measured.shape, measured.dtype) == (torch.Size(()), torch.float32)
    assert torch.equal(torch.stack([codec.measure(part) for part in parts]).max(), measured)
    codes = [codec.encode(part, measured) for part in parts if part.numel()]
    assert torch.equal(torch.cat(codes), codec.encode(whole, measured))
    assert all(part.dtype == torch.uint8 for part in codes)
    decoded = codec.decode(torch.cat(codes), measured, whole.dtype)
    assert (decoded.shape, decoded.dtype) == (whole.shape, whole.dtype)
    joined = torch.cat([codec.decode(part, measured, whole.dtype) for part in codes])
    assert torch.equal(joined, decoded)
    bad = torch.cat((whole, whole.new_full((1,), torch.nan)))
    assert not float(codec.measure(bad)) <= float(measured), "what is not finite shows"
    nothing = codec.decode(codes[0][:0], measured, whole.dtype)
    assert (nothing.numel(), nothing.dtype) == (0, whole.dtype)
