"""What stays in at least float32 in models of any make, and in autocast regions."""

import copy

import pytest
import torch
from torch import nn

from trainwright.precision import KINDS, DtypePolicy, policy

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
CAST_COPIES = DtypePolicy(FP32, BF16, FP32, FP32)


class RootMeanSquare(nn.Module):
    """A norm with an unspeaking name, as models bring along."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        self.seen = x.dtype
        return (self.gain * x * x.square().mean(-1, keepdim=True).rsqrt()).to(x.dtype)


class Angles(nn.Module):
    """Rotary angles as Hugging Face keeps them: a buffer that is not saved."""

    def __init__(self, dim=32, base=10000.0):
        super().__init__()
        frequencies = base ** -(torch.arange(0, dim, 2) / dim)
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, positions):
        return (positions[:, None].to(self.inv_freq.dtype) * self.inv_freq).cos()


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(nn.functional.silu(self.up(x)))


class Sparse(nn.Module):
    """Experts in a list, chosen by a Linear, as in Mixtral."""

    def __init__(self, width=4, num_experts=3):
        super().__init__()
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(num_experts))

    def forward(self, x):
        self.scores = self.gate(x)
        shares = self.scores.softmax(-1).to(x.dtype)
        return sum(shares[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


class StackedExperts(nn.Module):
    def __init__(self, width, num_experts):
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, width, width))

    def forward(self, x, shares):
        return torch.einsum("...w,ewv,...e->...v", x, self.up, shares.to(x.dtype))


class Choice(nn.Module):
    def __init__(self, width, num_experts):
        super().__init__()
        self.table = nn.Parameter(torch.randn(num_experts, width))
        self.bias = nn.Parameter(torch.zeros(num_experts))

    def forward(self, x):
        return nn.functional.linear(x, self.table, self.bias)


class Stacked(nn.Module):
    """Experts stacked in one parameter, chosen by a module with its own matrix."""

    def __init__(self, width=4, num_experts=3):
        super().__init__()
        self.choice = Choice(width, num_experts)
        self.experts = StackedExperts(width, num_experts)

    def forward(self, x):
        return self.experts(x, self.choice(x).softmax(-1))


class Block(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.first, self.mix = RootMeanSquare(4), nn.Linear(4, 4)
        self.second, self.sparse = nn.LayerNorm(4), sparse()

    def forward(self, x):
        x = x + self.mix(self.first(x))
        return x + self.sparse(self.second(x))


class Model(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.table, self.angles = nn.Embedding(8, 4), Angles()
        self.layers = nn.ModuleList(Block(sparse) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def kept_names(model):
    return {name for name, parameter in model.named_parameters() if parameter.dtype == FP32}


@pytest.mark.parametrize(
    ("sparse", "router"),
    [(Sparse, {"sparse.gate.weight"}), (Stacked, {"sparse.choice.table", "sparse.choice.bias"})],
)
def test_norms_and_routers_are_found_by_what_they_hold(sparse, router):
    model = Model(sparse)

    policy("bfloat16").apply(model)

    kept = {"first.gain", "second.weight", "second.bias", *router}
    assert kept_names(model) == {f"layers.{i}.{name}" for i in range(2) for name in kept}
    logits = model(torch.tensor([[1, 2, 3]]))
    assert (logits.dtype, model.layers[1].first.seen) == (FP32, FP32)
    logits.sum().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {BF16, FP32}


def test_only_names_rule_where_kinds_are_taken_away():
    model = Model(Sparse)

    policy("bfloat16", keep_fp32=["*.gate.*"], keep_kinds=()).apply(model)

    assert kept_names(model) == {f"layers.{i}.sparse.gate.weight" for i in range(2)}


def test_a_kind_is_any_function_from_a_model_to_modules():
    model = Model(Sparse)

    rules = policy("bfloat16", keep_kinds=[lambda root: [root.head]])
    rules.apply(model)

    assert kept_names(model) == {"head.weight", "head.bias"}


def test_blocks_with_norms_convolutions_and_tables_choose_no_experts():
    model = nn.ModuleDict(
        {
            "layers": nn.ModuleList(nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3)) for _ in "ab"),
            "filter": nn.Conv1d(1, 5, 3),
            "head": nn.Linear(3, 2),
            "classes": nn.Linear(3, 5),
            "table": nn.Embedding(2, 3),
        }
    )

    policy("bfloat16").apply(model)

    assert kept_names(model) == {
        f"layers.{i}.0.{name}" for i in "01" for name in ("weight", "bias")
    }


@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", FP32), ("float64", FP64)])
def test_softmax_and_loss_modules_compute_in_at_least_float32(name, dtype):
    model = nn.ModuleDict({"softmax": nn.Softmax(-1), "loss": nn.MSELoss(), "gelu": nn.GELU()})
    applied = policy(name).apply(model)
    narrow = torch.tensor([[1.0, 2.0]], dtype=BF16)

    assert model["softmax"](narrow).dtype == dtype
    assert model["loss"](narrow, narrow).dtype == dtype
    assert model["softmax"](narrow.double()).dtype == FP64
    assert model["gelu"](narrow).dtype == BF16
    applied.remove()
    assert model["softmax"](narrow).dtype == BF16


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("cast", [nn.Module.bfloat16, nn.Module.half, lambda m: m.to("cpu", BF16)])
def test_a_later_cast_of_the_model_narrows_no_angle_and_nothing_kept(cast, copied):
    model = Model(Sparse)
    policy("bfloat16").apply(model)
    before = kept_names(model)
    model = copy.deepcopy(model) if copied else model
    model.layers[0].second.weight.grad = torch.ones(4)
    positions = torch.arange(2048)
    exact = (positions.double()[:, None] * 10000.0 ** -(torch.arange(0, 32, 2).double() / 32)).cos()

    cast(model)

    assert (model.angles(positions).double() - exact).abs().max() < 1e-3
    assert kept_names(model) == before
    assert model.layers[0].second.weight.grad.dtype == FP32
    assert model.head.weight.dtype in (BF16, torch.float16)
    assert model.double().angles.inv_freq.dtype == FP64


def test_a_later_move_takes_buffers_along_and_removal_lets_casts_pass():
    model = Model(Sparse)
    applied = policy("bfloat16").apply(model)

    moved = copy.deepcopy(model).to("meta")
    applied.remove()
    model.bfloat16()

    assert moved.angles.inv_freq.device.type == "meta"
    assert moved.angles.inv_freq.dtype == FP32
    assert model.angles.inv_freq.dtype == BF16
    assert kept_names(model) == set()


def doubled(region, linear, change):
    """Whether a product follows a weight that is changed within one region."""
    x = torch.ones(1, 1)
    with region:
        first = linear(x)
        change()
        second = linear(x)
    return first.item(), second.item()


def one_weight():
    linear = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        linear.weight.fill_(1.0)
    linear.weight.grad = -torch.ones(1, 1)
    return linear, torch.optim.SGD(linear.parameters(), lr=1.0)


@pytest.mark.parametrize("how", ["fill_", "step"])
def test_a_region_of_autocast_sees_weights_that_change_within_it(how):
    linear, optimizer = one_weight()
    changes = {"fill_": lambda: linear.weight.data.fill_(2.0), "step": optimizer.step}
    stale, other = one_weight()
    old = {"fill_": lambda: stale.weight.data.fill_(2.0), "step": other.step}

    first, second = doubled(policy("bfloat16").autocast(), linear, changes[how])

    assert second == 2 * first
    # Torch's own region does not, which is why there is one of ours.
    assert doubled(torch.autocast("cpu", BF16), stale, old[how]) == (1.0, 1.0)


def test_an_inner_region_heeds_no_copy_that_an_outer_one_keeps():
    linear, optimizer = one_weight()
    with torch.autocast("cpu", BF16):
        linear(torch.ones(1, 1))

        first, second = doubled(policy("bfloat16").autocast(), linear, optimizer.step)

    assert (first, second) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("name", "dtype"), [("bfloat16", BF16), ("float16", torch.float16), ("float32", FP32)]
)
def test_a_region_computes_in_the_dtype_of_the_policy(name, dtype):
    with torch.autocast("cpu", BF16), policy(name).autocast():
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == dtype


@pytest.mark.parametrize("rules", [CAST_COPIES, policy("bfloat16")])
def test_what_is_kept_stays_so_in_a_region_of_autocast(rules):
    model = Model(Sparse)
    rules.apply(model)

    with torch.autocast("cpu", BF16):
        model(torch.tensor([[1, 2]]))
        outside = nn.functional.linear(torch.ones(1, 2), torch.ones(2, 2))

    assert model.layers[0].sparse.scores.dtype == FP32
    assert outside.dtype == BF16


def test_autocast_is_on_again_after_a_kept_module_raised():
    class Broken(RootMeanSquare):
        def forward(self, x):
            raise ArithmeticError("on purpose")

    model = Broken(2)
    policy("bfloat16").apply(model)

    with torch.autocast("cpu", BF16):
        with pytest.raises(ArithmeticError, match="on purpose"):
            model(torch.ones(2))
        assert torch.is_autocast_enabled("cpu")


def test_cast_copies_are_never_kept_by_autocast():
    linear, optimizer = one_weight()
    CAST_COPIES.apply(linear)

    assert doubled(torch.autocast("cpu", BF16), linear, optimizer.step) == (1.0, 2.0)


def test_a_policy_shows_its_kinds_by_name():
    assert "keep_kinds=(norms, softmaxes, losses, routers)" in repr(policy("float32"))
    assert policy("float32", keep_kinds=()).keep_kinds == ()
    assert len(KINDS) == 4
