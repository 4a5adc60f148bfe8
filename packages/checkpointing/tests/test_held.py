"""What a policy keeps can be held in host memory, in a file, or in fewer bits."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainwright.checkpointing.activations import (
    CastBFloat16,
    Compress,
    compose,
    hold_by,
    holding,
    keep_all,
    measure,
    offload_to_cpu,
    offload_to_folder,
    recompute_all,
    selective,
)
from trainwright.checkpointing.errors import OffloadError, PolicyError, ReplayError
from trainwright.checkpointing.testing.runners import LAYER_RUNNER_LAWS
from trainwright.collectives.codec import BlockFloat8, BlockInt8
from trainwright.collectives.testing.laws_of_codecs import CODEC_LAWS

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]


@st.composite
def tensors(draw):
    """Tensors of all sorts of strides: permuted, sliced, expanded, empty, of no dims."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensor = (torch.randn(shape, generator=generator) * 3).to(dtype)
    if shape:
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if shape and draw(st.booleans()):
        tensor = tensor[..., :: draw(st.integers(1, 2))]
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    return tensor


@settings(max_examples=25)
@given(tensor=tensors(), where=st.sampled_from(["cpu", "file"]))
def test_a_held_tensor_comes_back_with_its_bits_and_its_strides(tensor, where, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    keeper = offload_to_cpu() if where == "cpu" else offload_to_folder(folder)
    expected = tensor.clone()

    held = keeper.hold(tensor)
    if tensor.stride() and 0 not in tensor.stride():
        tensor.zero_()  # what was held is what was there

    for _ in range(2):
        restored = held.restore()
        assert torch.equal(restored, expected)
        assert restored.stride() == tensor.stride()
        assert restored.dtype == tensor.dtype


def mlp(dim, layers=3):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)
            )
            for _ in range(layers)
        )


def test_what_is_offloaded_leaves_one_allocator_for_the_other_and_both_are_empty_in_the_end():
    layers = mlp(16)
    keeper = offload_to_cpu()
    x = torch.randn(32, 16, requires_grad=True)
    with measure(layers.parameters()) as plain:
        expected = keep_all()(layers, x)
    expected.sum().backward()
    gradients = [p.grad for p in layers.parameters()]
    layers.zero_grad()

    with measure(layers.parameters()) as device:
        y = hold_by(keep_all(), keeper)(layers, x)
    after_forward = device.live_bytes, keeper.storage.held_bytes
    y.sum().backward()
    same = [torch.equal(p.grad, g) for p, g in zip(layers.parameters(), gradients, strict=True)]
    del y

    assert all(same)
    assert after_forward[0] == 0
    assert after_forward[1] >= plain.peak_bytes - x.untyped_storage().nbytes()
    # One operator's tensors at a time come back.
    assert 0 < device.peak_bytes <= 2 * 32 * 32 * 4
    assert device.live_bytes == keeper.storage.held_bytes == 0


def test_a_tensor_that_several_operators_save_is_held_once():
    keeper = offload_to_cpu()
    x = torch.randn(64, requires_grad=True)
    with holding(keeper):
        y = x.sin() + x.cos() + x.exp() * x
    assert keeper.storage.held_bytes == 2 * 64 * 4  # x, and exp(x)
    assert y.requires_grad


@pytest.mark.parametrize("compress", [False, True])
def test_one_storage_in_several_shapes_is_held_once(compress):
    host = offload_to_cpu()
    keeper = Compress(CastBFloat16(), then=host, min_bytes=0) if compress else host
    x = torch.randn(4, 6, requires_grad=True)
    with holding(keeper, [x]):
        y = (x * 2).exp()
        z = y.sum() + (y.view(24).sin() * y.t().reshape(6, 4).cos().reshape(24)).sum()
    assert host.storage.held_bytes <= 4 * 24 * (2 if compress else 4)
    z.backward()


def test_what_lies_between_the_elements_of_a_compressed_tensor_does_not_harm_it():
    storage = torch.full((64, 4), float("nan"))
    x = storage[:, 1:3].fill_(1.5).requires_grad_()
    with holding(Compress(BlockInt8(), min_bytes=0)):
        y = x.square()
    y.sum().backward()
    assert torch.allclose(x.grad, torch.full((64, 2), 3.0))


def test_parts_of_one_storage_are_held_together_and_come_back_together():
    keeper = offload_to_cpu()
    x = torch.randn(4, 6, requires_grad=True)
    with measure([x]) as device, holding(keeper, [x]):
        q, k, v = (x * 2).view(4, 3, 2).unbind(1)
        y = (q * k).sum() + (v * q).sum()
    assert keeper.storage.held_bytes == 4 * 6 * 4
    y.backward()
    assert device.peak_bytes == 4 * 6 * 4
    q, k, v = (x.detach() * 2).view(4, 3, 2).unbind(1)
    assert torch.equal(x.grad, 2 * torch.stack([k + v, q, q], 1).view(4, 6))


def test_parameters_and_buffers_stay_where_they_are():
    keeper = offload_to_cpu()
    layer = nn.Sequential(nn.Linear(8, 8, bias=False))
    x = torch.randn(2, 8, requires_grad=True)
    y = hold_by(keep_all(), keeper)([layer], x)
    assert keeper.storage.held_bytes == x.numel() * 4
    y.sum().backward()


def test_a_parameter_changed_before_backward_is_an_error_under_hooks_as_without():
    layer = nn.Linear(8, 8)
    y = hold_by(keep_all(), offload_to_cpu())([layer], torch.randn(2, 8, requires_grad=True))
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(ReplayError, match="modified by an inplace operation"):
        y.sum().backward()


def test_small_tensors_may_stay():
    keeper = offload_to_cpu(min_bytes=100)
    assert keeper.hold(torch.zeros(24)) is None
    assert keeper.hold(torch.zeros(25)) is not None
    for bad in ({"min_bytes": -1}, {"ahead": 1.5}):
        with pytest.raises(PolicyError, match="at least 0"):
            offload_to_cpu(**bad)


def test_sparse_meta_and_overlapping_tensors_stay_as_they_are():
    keeper = offload_to_cpu()
    overlapping = torch.zeros(8).as_strided((4, 3), (1, 1))
    for tensor in (torch.eye(3).to_sparse(), torch.zeros(3, device="meta"), overlapping):
        assert keeper.hold(tensor) is None


@pytest.mark.parametrize("law", LAYER_RUNNER_LAWS, ids=lambda law: law.__name__)
def test_a_file_obeys_the_laws_of_policies(law, tmp_path):
    for policy in (keep_all(), selective()):
        law(compose(policy, offload=str(tmp_path)), 3, 7)
    assert list(tmp_path.iterdir()) == []  # the file has no name


def test_the_space_of_a_file_is_used_again(tmp_path):
    keeper = offload_to_folder(tmp_path)
    sizes = []
    for _ in range(4):
        held = [keeper.hold(torch.full((n, 1000), float(n))) for n in (1, 5, 3)]
        assert [float(h.restore().mean()) for h in reversed(held)] == [3.0, 5.0, 1.0]
        del held[1]
        held.append(keeper.hold(torch.full((2, 1000), 7.0)))
        assert float(held[-1].restore().mean()) == 7.0
        del held
        sizes.append(keeper.storage.file_bytes)
    assert len(set(sizes)) == 1


def test_writing_goes_on_aside_and_reading_waits_for_it(tmp_path, monkeypatch):
    may_write = threading.Event()
    write = os.pwrite

    def slow(*args):
        assert may_write.wait(10)
        return write(*args)

    monkeypatch.setattr(os, "pwrite", slow)
    keeper = offload_to_folder(tmp_path, waiting_bytes=1 << 20)
    held = [keeper.hold(torch.full((100,), float(n))) for n in range(5)]  # does not wait
    may_write.set()
    assert [float(h.restore()[0]) for h in reversed(held)] == [4.0, 3.0, 2.0, 1.0, 0.0]


def test_a_disk_that_is_full_is_an_error_of_the_backward_that_names_the_folder(
    tmp_path, monkeypatch
):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    x = torch.randn(100, requires_grad=True)
    with holding(offload_to_folder(tmp_path)):
        y = x.sin()
    with pytest.raises(OffloadError, match=f"written to {tmp_path}.*No space left"):
        y.sum().backward()


KILLED = """
import sys, time, torch
from trainwright.checkpointing.activations import offload_to_folder
keeper = offload_to_folder(sys.argv[1])
held = keeper.hold(torch.zeros(1 << 20))
held.restore()
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.long
def test_nothing_is_left_in_the_folder_when_the_process_is_killed(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    watchdog = threading.Timer(60, child.kill)
    watchdog.start()
    try:
        assert child.stdout.readline() == "held\n"
        os.kill(child.pid, signal.SIGKILL)
        child.wait(20)
    finally:
        watchdog.cancel()
        child.kill()
        child.wait()
        child.stdout.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("law", CODEC_LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.is_floating_point], ids=str)
def test_bfloat16_obeys_the_laws_of_codecs(law, dtype):
    generator = torch.Generator().manual_seed(3)
    for scale in (1e-7, 1.0, 3e4):
        law(CastBFloat16(), (torch.randn(5, 7, generator=generator) * scale).to(dtype))
    largest = torch.full((2, 2), torch.finfo(dtype).max, dtype=dtype)
    for odd in (torch.zeros(0, dtype=dtype), torch.tensor(1e-41, dtype=dtype), largest):
        law(CastBFloat16(), odd)


CODECS = {"int8": BlockInt8(), "fp8": BlockFloat8(), "bf16": CastBFloat16()}


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@settings(max_examples=8)
@given(seed=st.integers(0, 99), scale=st.sampled_from([1e-6, 1.0, 1e6]))
def test_what_backward_sees_is_within_the_bound_of_what_was_saved(codec, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(8, 96, generator=generator) * scale).requires_grad_()
    with holding(Compress(codec, min_bytes=0)):
        y = x.square()
    y.sum().backward()

    # The gradient of the square is twice what was saved; doubling is exact.
    error = (x.grad.double() / 2 - x.detach().double()).abs()
    assert bool((error <= codec.error_bound(x.detach())).all())
    assert float(error.max()) > 0
    assert torch.equal(y.detach(), x.detach().square())


def test_compression_keeps_fewer_bytes_and_gradients_near():
    layers = mlp(64)
    x = torch.randn(256, 64, requires_grad=True)

    def run(policy):
        with measure(layers.parameters()) as kept:
            y = policy(layers, x)
        forward = kept.live_bytes
        gradients = torch.autograd.grad(y.square().sum(), [*layers.parameters()])
        return forward, y.detach(), torch.cat([g.flatten() for g in gradients])

    plain, expected, gradient = run(keep_all())
    for codec, share, most in (("int8", 0.27, 0.02), ("fp8", 0.27, 0.1), ("bf16", 0.51, 0.01)):
        kept, y, near = run(compose(keep_all(), compress=codec))
        assert torch.equal(y, expected)
        assert kept < share * plain
        assert 0 < float((near - gradient).norm() / gradient.norm()) < most


def test_only_floating_point_that_gets_smaller_is_compressed():
    to_int8, to_bf16 = Compress(BlockInt8(), min_bytes=0), Compress(CastBFloat16(), min_bytes=0)
    assert to_int8.hold(torch.ones(256, dtype=torch.int64)) is None
    assert to_int8.hold(torch.ones(256, dtype=torch.bool)) is None
    assert to_int8.hold(torch.ones(64, 1)) is None  # statistics, one a row
    assert to_int8.hold(torch.ones(2, dtype=torch.float16)) is None  # a scale would take more
    assert to_bf16.hold(torch.ones(256, dtype=torch.float16)) is None
    assert Compress(BlockInt8()).hold(torch.ones(255)) is None
    assert to_int8.hold(torch.ones(256, dtype=torch.bfloat16)) is not None
    with pytest.raises(PolicyError, match="needs a codec"):
        Compress("int8")


@pytest.mark.parametrize("fused", [False, True])
def test_statistics_of_rows_are_not_compressed(fused):
    held = []

    class Noting:
        def hold(self, tensor):
            held.append((tensor.numel(),))
            return None

    x = torch.randn(2, 4, 32, 3 * 8, requires_grad=True)
    q, k, v = (x * 1).chunk(3, -1) if fused else [x[..., :8].clone() for _ in range(3)]
    with measure() as kept, holding(Compress(BlockFloat8(), then=Noting(), min_bytes=0)):
        y = F.scaled_dot_product_attention(q, k, v)
        z = F.layer_norm(y, (8,))

    # The log-sum-exp, mean and deviation, as they are; encoded are numbers and scales.
    assert held.count((2 * 4 * 32,)) == 3
    assert kept.live_bytes < 6 * 2 * 4 * 32 * 8 * 2
    z.sum().backward()


def test_values_that_are_not_finite_are_never_restored_as_finite_ones():
    x = torch.ones(4, 64)
    x[1, 3] = float("nan")
    x[2, 5] = float("inf")
    for codec in CODECS.values():
        restored = Compress(codec, min_bytes=0).hold(x).restore()
        assert not restored[1, 3].isfinite()
        assert not restored[2, 5].isfinite()


def test_compressed_parts_are_offloaded_in_turn():
    layers = mlp(16)
    x = torch.randn(32, 16, requires_grad=True)
    policy = compose(recompute_all(), offload="cpu", compress="int8")

    with measure(layers.parameters()) as kept:
        y = policy(layers, x)

    assert kept.live_bytes == 0
    blocks = 32 * 16 // 128
    assert policy.keeper.then.storage.held_bytes == 3 * (32 * 16 + 4 * blocks)
    y.sum().backward()
    assert x.grad is not None


def test_measuring_counts_distinct_storages_while_they_live():
    x = torch.randn(10, requires_grad=True)
    with measure() as counted:
        y = x.sin() * x.cos()  # x once, and both results
        z = F.relu(y)
    assert counted.live_bytes == counted.peak_bytes == 4 * 40
    del y
    z.sum().backward()
    del z
    assert counted.live_bytes == 40  # x is there still
    del x
    assert counted.live_bytes == 0
    counted.reset_peak()
    assert counted.peak_bytes == 0
