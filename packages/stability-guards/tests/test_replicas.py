"""Replicas are compared bit for bit, and the odd rank is named."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright.collectives import LocalWorld, Recorded, SingleCommunicator
from trainwright.stability_guards import (
    GuardError,
    Mismatch,
    checksum,
    checksums,
    compare_replicas,
)

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.complex64,
]


def flip(tensor, octet, bit):
    flat = tensor.view(-1).view(torch.uint8)
    flat[octet] ^= 1 << bit


@given(
    dtype=st.sampled_from(DTYPES),
    numel=st.sampled_from([1, 3, 8, 1025, 5000]),
    place=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
)
def test_any_flipped_bit_changes_the_checksum(dtype, numel, place, bit):
    octets = torch.randint(256, (numel * dtype.itemsize,), dtype=torch.uint8)
    if dtype == torch.bool:
        octets = octets % 2
    tensor = octets.view(dtype)
    before = checksum(tensor)

    flip(tensor, int(place * octets.numel()), 0 if dtype == torch.bool else bit)

    assert checksum(tensor) != before


@pytest.mark.parametrize("place", [0, 4095, 4096, 8191, 8192, 9999, 20000])
def test_the_highest_bit_of_a_word_counts_in_every_chunk(place):
    tensor = torch.randn(20001, dtype=torch.float64)
    before = checksum(tensor)

    tensor[place] *= -1

    assert checksum(tensor) != before


@given(shift=st.integers(0, 9), numel=st.integers(0, 40))
def test_a_checksum_is_of_the_bits_wherever_they_lie(shift, numel):
    base = torch.randn(60)
    there = base[shift : shift + numel]

    assert checksum(there) == checksum(there.clone())
    assert checksum(torch.stack([there, there]).T) == checksum(
        torch.stack([there, there]).T.contiguous()
    )


def test_order_and_signs_of_zero_count():
    long = torch.randn(3 * 8192)
    swapped = torch.cat([long[8192:16384], long[:8192], long[16384:]])

    assert checksum(long) != checksum(swapped)
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    assert checksum(torch.zeros(0)) == 0
    assert checksums({}).tolist() == []


@given(size=st.integers(3, 5), odd=st.integers(0, 4), where=st.integers(0, 2))
def test_a_flipped_bit_on_one_of_many_ranks_is_named(size, odd, where):
    names = ["embed.weight", "layers.0.norm.weight", "lm_head.weight"]
    weights = {name: torch.randn(7, 3) for name in names}

    def compare(communicator):
        mine = {name: tensor.clone() for name, tensor in weights.items()}
        if communicator.rank == odd % size:
            flip(mine[names[where]], 33, 3)
        return compare_replicas(mine, communicator)

    found = LocalWorld(size).run(compare)

    assert found == [(Mismatch(names[where], (odd % size,), True),)] * size
    assert str(found[0][0]) == f"{names[where]} differs on rank {odd % size}"


def test_equal_replicas_cost_one_small_collective_and_no_name_is_given():
    def compare(communicator):
        recorded = Recorded(communicator)
        found = compare_replicas({"w": torch.ones(1000), "b": torch.ones(3)}, recorded)
        return found, recorded.traffic

    for found, traffic in LocalWorld(2).run(compare):
        assert found == ()
        assert list(traffic) == ["all_gather"]
        assert traffic["all_gather"].operations == 1
        assert traffic["all_gather"].bytes_in == 16


def test_two_ranks_have_no_majority():
    def compare(communicator):
        return compare_replicas({"w": torch.full((2,), float(communicator.rank))}, communicator)

    for found in LocalWorld(2).run(compare):
        assert found == (Mismatch("w", (0, 1), False),)
        assert "no majority" in str(found[0])


def test_ranks_that_compare_other_tensors_are_told_alike():
    def compare(communicator):
        name = "w" if communicator.rank != 1 else "v"
        try:
            compare_replicas({name: torch.ones(2)}, communicator)
        except GuardError as error:
            return str(error)
        return ""

    messages = LocalWorld(3).run(compare)

    assert len(set(messages)) == 1
    assert "ranks 1 of" in messages[0]


def test_nothing_and_one_rank_are_the_same_as_themselves():
    assert compare_replicas({}, SingleCommunicator()) == ()
    assert compare_replicas({"w": torch.tensor([float("nan")])}, SingleCommunicator()) == ()
    with pytest.raises(AttributeError):
        Mismatch("w", (0,), True).name = "v"
