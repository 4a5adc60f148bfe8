import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainwright.collectives.codec import BlockFloat8, BlockInt8, Codec, Packing
from trainwright.collectives.errors import UsageError
from trainwright.collectives.testing.laws_of_codecs import CODEC_LAWS

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CODECS = [BlockInt8(), BlockInt8(block=3), BlockFloat8(), BlockFloat8(block=5, format=E5M2)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def spread(shape, dtype, seed, exponent):
    """Values over many orders of magnitude around 10^exponent, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, dtype=torch.float64, generator=generator)
    values = values * 10.0 ** (4 * torch.rand(shape, generator=generator) - 4)
    values = values * (torch.rand(shape, generator=generator) > 0.1) * 10.0**exponent
    return values.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


@pytest.mark.parametrize("law", CODEC_LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("codec", CODECS, ids=repr)
@settings(max_examples=8)
@given(
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
    exponent=st.sampled_from([0, 3, -6, -40, 38]),
)
@example(shape=(), dtype=torch.bfloat16, seed=0, exponent=0)
@example(shape=(300,), dtype=torch.float32, seed=1, exponent=-38)
@example(shape=(2, 64), dtype=torch.float64, seed=2, exponent=38)
def test_every_codec_keeps_the_laws(law, codec, shape, dtype, seed, exponent):
    law(codec, spread(shape, dtype, seed, exponent))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_numbers_of_a_dtype_come_back_finite(codec, dtype):
    largest = torch.finfo(dtype).max
    tensor = torch.tensor([largest, -largest, largest / 2, 0.0], dtype=dtype)

    decoded = codec.decode(codec.encode(tensor), tensor.shape, dtype)

    assert decoded.isfinite().all()
    error = (decoded.double() - tensor.double()).abs()
    assert (error <= codec.error_bound(tensor)).all()


def test_int8_is_off_by_at_most_a_254th_of_the_largest_magnitude_of_its_block():
    tensor = torch.linspace(-1, 1, 2001)

    decoded = BlockInt8(block=2001).decode(
        BlockInt8(block=2001).encode(tensor), tensor.shape, torch.float32
    )

    assert (decoded - tensor).abs().max() == pytest.approx(1 / 254, rel=0.02)


def test_a_large_element_costs_precision_only_in_its_own_block():
    tensor = torch.full((256,), 0.3)
    tensor[200] = 1e6

    first, second = BlockInt8().error_bound(tensor).view(2, 128).amax(1)

    assert first == pytest.approx(0.3 / 254, rel=1e-3)
    assert second == pytest.approx(1e6 / 254, rel=1e-3)


def test_e4m3_keeps_four_bits_and_e5m2_three():
    tensor = torch.tensor([448.0, 17.0, 18.0, 19.0])
    wide = torch.tensor([57344.0, 9.0, 10.0, 11.0])

    narrow = BlockFloat8(4).decode(BlockFloat8(4).encode(tensor), (4,), torch.float32)
    coarse = BlockFloat8(4, E5M2)
    coarse = coarse.decode(coarse.encode(wide), (4,), torch.float32)

    # Scales are one; halves go to the even neighbour.
    assert narrow.tolist() == [448.0, 16.0, 18.0, 20.0]
    assert coarse.tolist() == [57344.0, 8.0, 10.0, 12.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("format", [E4M3, E5M2])
def test_every_finite_number_of_a_format_comes_back_as_it_is(format, dtype):
    codes = torch.arange(256).to(torch.uint8).view(format)
    numbers = codes.to(dtype)[codes.to(dtype).isfinite()]
    codec = BlockFloat8(256, format)

    stored, scales = codec.encode(numbers)

    assert scales.tolist() == [1.0]
    assert torch.equal(stored.to(dtype), numbers)
    assert torch.equal(codec.decode((stored, scales), numbers.shape, dtype), numbers)


@pytest.mark.parametrize("codec", [BlockInt8(128), BlockInt8(1000), BlockFloat8(96)], ids=repr)
def test_a_long_tensor_is_encoded_and_decoded_as_its_blocks_are(codec):
    half = 300 * codec.block * (1000 // codec.block + 1)
    tensor = torch.randn(2 * half + 5, generator=torch.Generator().manual_seed(0))

    parts = codec.encode(tensor)
    decoded = codec.decode(parts, tensor.shape, tensor.dtype)

    pieces = tensor.split(half)
    for part, encoded in zip(parts, zip(*map(codec.encode, pieces), strict=True), strict=True):
        joined = torch.cat([piece.view(torch.uint8) for piece in encoded])
        assert torch.equal(part.view(torch.uint8), joined)
    assert torch.equal(
        decoded,
        torch.cat([codec.decode(codec.encode(p), p.shape, p.dtype) for p in pieces]),
    )
    assert ((decoded - tensor).abs() <= codec.error_bound(tensor)).all()


def test_float64_is_rounded_to_eight_bits_once():
    # Above the middle of 16 and 18 by less than float32 can tell.
    tensor = torch.tensor([448.0, 17.0 + 2.0**-40], dtype=torch.float64)

    decoded = BlockFloat8(2).decode(BlockFloat8(2).encode(tensor), (2,), torch.float64)

    assert decoded.tolist() == [448.0, 18.0]


@pytest.mark.parametrize(
    ("codec", "dtype", "num_bytes"),
    [
        (BlockInt8(128), torch.bfloat16, 1000 + 8 * 4),
        (BlockInt8(128), torch.float64, 1000 + 8 * 8),
        (BlockFloat8(100), torch.float32, 1000 + 10 * 4),
    ],
)
def test_an_encoded_element_is_one_byte_and_its_share_of_a_scale(codec, dtype, num_bytes):
    parts = codec.encode(torch.ones(1000, dtype=dtype))

    assert sum(part.nbytes for part in parts) == num_bytes
    assert sum(part.untyped_storage().nbytes() for part in parts) == num_bytes


@pytest.mark.parametrize(
    ("codec", "smallest"),
    [(BlockInt8(), 1.0), (BlockFloat8(), 2.0**-9), (BlockFloat8(format=E5M2), 2.0**-16)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scales_stay_so_large_that_no_product_loses_digits(codec, smallest, dtype):
    tiny = torch.finfo(dtype).smallest_normal

    for tensor in (torch.zeros(3, dtype=dtype), torch.full((3,), tiny, dtype=dtype)):
        _, scales = codec.encode(tensor)
        assert (scales * smallest).tolist() == [tiny]


def test_codecs_are_values_that_keep_the_protocol():
    assert isinstance(BlockInt8(), Codec)
    assert isinstance(BlockFloat8(), Codec)
    assert BlockInt8(64) == BlockInt8(block=64) != BlockInt8(32)


@given(lengths=st.lists(st.integers(0, 40), max_size=4), rows=st.integers(1, 3))
def test_packed_tensors_come_back_from_any_row(lengths, rows):
    dtypes = [torch.int8, torch.float64, E4M3, torch.bfloat16]
    parts = [torch.arange(length).to(dtype) for length, dtype in zip(lengths, dtypes, strict=False)]
    packing = Packing.of(parts)
    buffer = torch.full((rows, packing.num_bytes), 7, dtype=torch.uint8)

    for row in buffer:
        packing.pack(parts, row)

    for row in buffer:
        for part, found in zip(parts, packing.unpack(row), strict=True):
            assert found.dtype is part.dtype
            assert torch.equal(found.double(), part.double())
    assert packing.num_bytes == sum(math.ceil(part.nbytes / 16) * 16 for part in parts)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: BlockInt8(block=0), "block=0 must be a number of elements"),
        (lambda: BlockFloat8(block=True), "block=True must be"),
        (lambda: BlockFloat8(format=torch.int8), "float8_e4m3fn or float8_e5m2"),
        (lambda: BlockInt8().encode(torch.arange(3)), "got int64; convert it"),
        (lambda: BlockFloat8().encode(torch.ones(2, dtype=torch.complex64)), "view_as_real"),
        (lambda: BlockInt8().encode([1.0]), "expected a tensor, got list"),
        (
            lambda: BlockInt8(4).decode(BlockInt8(4).encode(torch.ones(8)), (9,), torch.float32),
            "9 int8 and 3 scales",
        ),
        (
            lambda: BlockInt8().decode(BlockFloat8().encode(torch.ones(8)), (8,), torch.float32),
            "decode what encode returned",
        ),
        (
            lambda: BlockInt8().decode(BlockInt8().encode(torch.ones(8)), (8,), torch.int8),
            "decodes to floating-point",
        ),
        (
            lambda: Packing.of([torch.ones(2)]).pack([torch.ones(3)], torch.zeros(16).byte()),
            "must be alike",
        ),
    ],
)
def test_what_cannot_be_encoded_is_refused_with_the_way_out(mistake, message):
    with pytest.raises(UsageError, match=message):
        mistake()
