"""What users of other systems have met with mixtures of experts, each with the right value."""

import pytest
import torch

from trainwright.collectives import LocalWorld, SingleCommunicator, random
from trainwright.sharding import Mesh, MeshShape, ShardingError, one_norm, placements_of, shard_spec
from trainwright.sharding.data import data_parallel, parameter_groups
from trainwright.sharding.expert import MixtureOfExperts, Routing, update_expert_bias
from trainwright.sharding.expert.testing import sum_gradients

EXACT = {"dtype": torch.float64}


def single(routing, width=2, expert_width=3, **options):
    mesh = Mesh(SingleCommunicator(), MeshShape())
    layer = MixtureOfExperts(width, expert_width, routing, mesh, **EXACT, **options)
    layer.reset_parameters(random.Key(0, "layer"), 0.7)
    return layer


def draw(name, *shape):
    return random.normal(random.Key(1, name), shape, dtype=torch.float64)


def prefer_first(layer, strength=1.0):
    """Let every token of [1, 0] have probabilities .9 and .1."""
    with torch.no_grad():
        layer.gate.weight.copy_(
            torch.tensor([[strength, 0.0], [0.0, 0.0]]) * torch.tensor(9.0).log()
        )


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,ep=2", "tp=2,ep=2,etp=1", "tp=2"])
def test_gradients_of_experts_are_exactly_the_serial_ones_whatever_ep_is(layout):
    def run(world, layout):
        mesh = Mesh(world, MeshShape.parse(layout))
        layer = MixtureOfExperts(2, 4, Routing(2, 1), mesh, **EXACT)
        layer.reset_parameters(random.Key(0, "layer"), 1.0)
        whole = draw("tokens", 2, 3, 2)
        own = whole.chunk(mesh.size("dp"))[mesh.coordinate("dp")]
        output, _ = layer(own)
        (output.sum() / whole[..., 0].numel()).backward()
        return sum_gradients(layer, mesh)

    expected = LocalWorld(1).run(lambda world: run(world, "dp=1"))[0]

    for found in LocalWorld(2).run(lambda world: run(world, layout)):
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-14, atol=1e-15, msg=name)


def test_an_expert_that_all_data_ranks_feed_has_their_mean_at_ep_1_and_2():
    # Rank 0's tokens give the expert a gradient of 2, rank 1's one of 4: of the mean loss, 3.
    def run(world, layout):
        mesh = Mesh(world, MeshShape.parse(layout))
        layer = MixtureOfExperts(1, 1, Routing(2, 1), mesh, **EXACT)
        with torch.no_grad():
            layer.gate.weight.copy_(torch.tensor([[1.0], [0.0]]))
            layer.experts.gate_up_proj.fill_(1.0)
        output, _ = layer(torch.ones(1, 1, 1, **EXACT))
        act = torch.nn.functional.silu(torch.ones((), **EXACT)).item()
        (output.sum() * [2.0, 4.0][world.rank] / act / 2).backward()
        return sum_gradients(layer, mesh)["experts.down_proj"].flatten().tolist()

    for layout in ("dp=2", "dp=2,ep=2"):
        for found in LocalWorld(2).run(lambda world, layout=layout: run(world, layout)):
            assert found == pytest.approx([3.0, 0.0])


def test_the_balance_loss_reaches_the_router_with_its_coefficient():
    def gradient(coefficient):
        layer = single(Routing(3, 2), width=4)
        output, report = layer(draw("tokens", 2, 5, 4))
        (output.square().sum() + coefficient * report.balance).backward()
        return layer.gate.weight.grad

    layer = single(Routing(3, 2), width=4)
    tokens = draw("tokens", 2, 5, 4)
    probabilities = (tokens @ layer.gate.weight.T).softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter(2, probabilities.topk(2).indices, 1.0)
    loss = 5 * 3 * (chosen.mean(1) / 2 * probabilities.mean(1)).sum()
    (plain,) = torch.autograd.grad(loss, layer.gate.weight)

    torch.testing.assert_close(gradient(0.01) - gradient(0.0), 0.01 * plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("factor", [None, 1.0, 0.5])
def test_balance_is_measured_on_real_choices_before_any_is_dropped(factor):
    layer = single(Routing(2, 1, capacity_factor=factor))
    prefer_first(layer)
    tokens = torch.tensor([[[1.0, 0.0]] * 4], **EXACT)

    _, report = layer(tokens)

    assert report.balance.item() / 4 == pytest.approx(1.8)
    assert report.counts.tolist() == [4, 0]
    assert report.dropped.tolist() == [{None: 0, 1.0: 2, 0.5: 3}[factor], 0]


@pytest.mark.parametrize("places", [[0, 1], [2, 3], [0, 3]])
def test_padding_takes_no_capacity_whatever_it_holds(places):
    layer = single(Routing(2, 1, capacity_factor=2.0, normalize=False), shared_width=2)
    prefer_first(layer)
    tokens = torch.tensor([[[1.0, 0.3]] * 4], **EXACT)
    tokens[0, places] = torch.nan
    valid = torch.ones(1, 4, dtype=torch.bool)
    valid[0, places] = False
    tokens.requires_grad_()
    alone = tokens.detach()[valid][None].requires_grad_()

    output, report = layer(tokens, valid)
    expected, unpadded = layer(alone)
    output.sum().backward()
    expected.sum().backward()

    assert report.counts.tolist() == unpadded.counts.tolist() == [2, 0]
    assert report.dropped.tolist() == [0, 0]
    assert report.balance.item() == pytest.approx(unpadded.balance.item())
    torch.testing.assert_close(output[valid], expected[0])
    torch.testing.assert_close(tokens.grad[valid], alone.grad[0])
    assert output[~valid].tolist() == tokens.grad[~valid].tolist() == [[0.0, 0.0]] * 2
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("lengths", [(3, 4), (0, 4), (4, 0), (0, 0)])
def test_ranks_with_other_numbers_of_tokens_or_none_do_not_wait_for_each_other(lengths):
    tokens = [draw(f"{rank}", 1, length, 3) for rank, length in enumerate(lengths)]
    layer = single(Routing(4, 2), width=3)
    expected = [layer(own)[0].detach() for own in tokens]

    def run(world):
        mesh = Mesh(world, MeshShape(dp=2, ep=2))
        layer = MixtureOfExperts(3, 3, Routing(4, 2), mesh, **EXACT)
        layer.reset_parameters(random.Key(0, "layer"), 0.7)
        own = tokens[world.rank].clone().requires_grad_()
        output, _ = layer(own)
        output.sum().backward()
        return output.detach()

    for found, whole in zip(LocalWorld(2).run(run), expected, strict=True):
        torch.testing.assert_close(found, whole)


def test_the_norm_counts_each_expert_once_and_what_is_replicated_once():
    def run(world):
        mesh = Mesh(world, MeshShape(dp=4, ep=2))
        layer = MixtureOfExperts(2, 2, Routing(4, 1), mesh, **EXACT)
        parallel = data_parallel(layer, mesh)
        for piece in parallel.pieces.values():
            piece.parameter.grad = torch.ones_like(piece.parameter)
        norm = one_norm(mesh, parallel.pieces.values()).norm.item()
        return norm, sum(shard_spec(n, p, mesh).numel for n, p in placements_of(layer).items())

    # 4 * (8 + 4) of experts, 8 of the router; two experts on each rank.
    assert LocalWorld(4).run(run) == [(pytest.approx(56**0.5), 32)] * 4


def test_weight_decay_by_dims_takes_all_matrices_of_experts_and_no_bias():
    layer = single(Routing(4, 2, biased=True), shared_width=2, shared_gate=True)
    parallel = data_parallel(layer, Mesh(SingleCommunicator(), MeshShape()))

    (decayed,) = parameter_groups(parallel, lambda spec: len(spec.global_shape) >= 2)

    assert len(decayed["params"]) == len(list(layer.parameters())) == 7


def test_the_bias_moves_against_the_load_of_the_whole_step_and_changes_no_weight():
    def run(world):
        mesh = Mesh(world, MeshShape(dp=2))
        layer = MixtureOfExperts(2, 2, Routing(2, 1, biased=True, score="sigmoid"), mesh, **EXACT)
        prefer_first(layer)
        for length in (1, 2 + world.rank):  # two micro-batches
            layer(torch.tensor([[[1.0, 0.0]] * length], **EXACT))
        layer.eval()
        layer(torch.tensor([[[1.0, 0.0]] * 9], **EXACT))
        update_expert_bias(layer, mesh, 0.25)
        first = layer.gate.e_score_correction_bias.tolist()
        update_expert_bias(layer, mesh, 0.25)
        weights = layer.routing.weights(torch.ones(1, 2), torch.tensor([[0]]))
        return first, layer.gate.e_score_correction_bias.tolist(), weights.item()

    assert LocalWorld(2).run(run) == [([-0.25, 0.25], [-0.25, 0.25], pytest.approx(1.0))] * 2


def test_of_equal_experts_the_first_ones_are_chosen():
    rule = Routing(6, 3)
    assert rule.choose(torch.zeros(2, 6)).tolist() == [[0, 1, 2]] * 2
    grouped = Routing(6, 2, groups=3, top_groups=1)
    assert grouped.choose(torch.zeros(1, 6)).tolist() == [[0, 1]]
    assert rule.choose(torch.tensor([[-200.0, -150, 0, -190, -180, -300]])).tolist() == [[2, 1, 4]]


def test_a_group_of_experts_is_as_good_as_its_best():
    scores = torch.tensor([[0.9, 0.0, 0.5, 0.5, 0.1, 0.2]]).logit()
    pairs = Routing(6, 2, score="sigmoid", groups=3, top_groups=1, group_best=2)
    best = Routing(6, 2, score="sigmoid", groups=3, top_groups=1, group_best=1)
    assert pairs.choose(scores).tolist() == [[2, 3]]
    assert best.choose(scores).tolist() == [[0, 1]]


def test_the_router_computes_in_float32_also_under_autocast():
    mesh = Mesh(SingleCommunicator(), MeshShape())
    layer = MixtureOfExperts(8, 8, Routing(4, 2), mesh, dtype=torch.float32)
    layer.reset_parameters(random.Key(0, "layer"), 0.3)
    hidden = random.normal(random.Key(0, "x"), (1, 5, 8))
    exact = layer.gate(hidden[0])
    with torch.autocast("cpu", torch.bfloat16):
        logits = layer.gate(hidden[0])
        output, report = layer(hidden)
        assert layer.bfloat16().gate(hidden[0].bfloat16()).dtype == torch.float32
    (output.sum() + report.balance).backward()
    assert torch.equal(logits, exact)
    assert report.balance.dtype == output.dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Routing(4, 5), "top_k=5 .* only 4 can be chosen"),
        (lambda: Routing(4, 2, groups=3), "groups=3 must divide num_experts=4"),
        (lambda: Routing(4, 2, groups=2, top_groups=3), "top_groups=3 of groups=2"),
        (lambda: Routing(8, 3, groups=4, top_groups=1), "only 2 can be chosen"),
        (lambda: Routing(4, 0), "top_k must be a positive int, got 0"),
        (lambda: Routing(4, 1, capacity_factor=0.0), "capacity_factor must be finite and positive"),
        (lambda: Routing(4, 1, score="relu"), "softmax or sigmoid, got 'relu'"),
        (lambda: Routing(4, 1, scope="batch"), "sequence or microbatch, got 'batch'"),
        (lambda: single(Routing(4, 1), shared_gate=True), "give it a shared_width"),
        (lambda: single(Routing(4, 1))(draw("x", 2, 3, 5)), r"\[B, S, 2\], got shape \(2, 3, 5\)"),
        (
            lambda: single(Routing(4, 1))(draw("x", 2, 3, 2), torch.ones(2, 3)),
            r"valid must be bool of shape \(2, 3\)",
        ),
        (
            lambda: single(Routing(4, 1))(draw("x", 2, 3, 2), positions_S=torch.arange(4)),
            r"positions must be integers of shape \(3,\)",
        ),
        (lambda: update_expert_bias(torch.nn.Identity(), None, -1.0), "finite and >= 0, got -1.0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make, message):
    with pytest.raises(ShardingError, match=message):
        make()


def test_ranks_that_cannot_share_the_experts_are_refused_before_they_talk():
    def run(world, layout, experts, width, **options):
        mesh = Mesh(world, MeshShape.parse(layout))
        layer = MixtureOfExperts(2, width, Routing(experts, 1, **options), mesh)
        layer(torch.ones(1, 2, 2))

    for layout, experts, width, options, message in (
        ("dp=2,ep=2", 3, 2, {}, "num_experts is 3, which ep=2 does not divide"),
        ("tp=2", 2, 3, {}, "expert_width is 3, which etp=2 does not divide"),
        ("cp=2", 2, 2, {"capacity_factor": 1.0}, "pass positions_S"),
    ):
        with pytest.raises(ShardingError, match=message):
            LocalWorld(2).run(lambda world: run(world, layout, experts, width, **options))  # noqa: B023
