"""Documents in one sequence do not see each other, whoever holds its parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import attrs
import pytest
import torch

from trainwright.checkpointing.activations import keep_all, recompute_all
from trainwright.collectives import Communicator, LocalWorld
from trainwright.integration.errors import ConfigError
from trainwright.integration.model import (
    DecoderStage,
    ExpertShape,
    ModelShape,
    PlainLayers,
    TensorParallelLayers,
    build_stage,
    initialize_,
)
from trainwright.integration.sequence_part import SequencePart
from trainwright.pipeline_schedules.execute.output import as_stage_output
from trainwright.sharding import Mesh, MeshShape, placements_of
from trainwright.sharding.context import ContextLayout, Documents
from trainwright.sharding.expert import Routing, capture_routing

ROTARY = ModelShape(vocabulary=16, width=32, layers=2, heads=4, kv_heads=2, mlp_width=48)
LEARNED = attrs.evolve(
    ROTARY, norm="layer", positions="learned", max_positions=16, gated=False, qkv_bias=True
)
SPARSE = attrs.evolve(ROTARY, experts=ExpertShape(Routing(4, 2), 24, 24, shared_gate=True))
A, B = [1, 2, 3], [4, 5, 6, 7, 8]


def plain(shape: ModelShape, runner: Callable = keep_all, dtype=torch.float64) -> DecoderStage:
    stage = build_stage(shape, PlainLayers(), range(shape.layers), runner()).to(dtype)
    initialize_(stage, placements_of(stage), shape, 0)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.mul_(5.0 if parameter.dim() > 1 else 1.0)
    return stage


def logits_of(stage: DecoderStage, rows: list[list[list[int]]]) -> torch.Tensor:
    """Return the logits of rows of documents, each row of as many tokens."""
    numbers = [[n for n, document in enumerate(row) for _ in document] for row in rows]
    ordinals = [[at for document in row for at in range(len(document))] for row in rows]
    returned = stage(
        tokens_BS=torch.tensor([list(itertools.chain(*row)) for row in rows]),
        documents_BS=torch.tensor(numbers),
        ordinals_BS=torch.tensor(ordinals),
    )
    return as_stage_output(returned).output


def alone(stage: DecoderStage, tokens: list[int]) -> torch.Tensor:
    return as_stage_output(stage(tokens_BS=torch.tensor([tokens]))).output[0]


@pytest.mark.parametrize("shape", [ROTARY, LEARNED, SPARSE], ids=["rotary", "learned", "sparse"])
def test_a_document_in_a_pack_is_computed_as_if_it_were_alone(shape: ModelShape) -> None:
    stage = plain(shape, dtype=torch.float32)

    packed = logits_of(stage, [[A, B], [B, A]])

    positions = Documents.of(torch.tensor([[0] * 3 + [1] * 5])).positions()
    assert positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    for found, tokens in [
        (packed[0, :3], A),
        (packed[0, 3:], B),
        (packed[1, :5], B),
        (packed[1, 5:], A),
    ]:
        torch.testing.assert_close(found, alone(stage, tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize("runner", [keep_all, recompute_all], ids=["kept", "recomputed"])
def test_what_one_document_says_changes_nothing_of_the_next(runner: Callable) -> None:
    stage = plain(ROTARY, runner)

    def run(first: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        stage.zero_grad()
        logits = logits_of(stage, [[first, B], [B, first]])
        logits[0, 3:].square().sum().backward()
        return logits.detach(), stage.model["embed_tokens"].weight.grad.clone()

    logits, gradient = run(A)
    others, other_gradient = run([9, 10, 11])

    assert torch.equal(logits[0, 3:], others[0, 3:])
    assert torch.equal(logits[1, :5], others[1, :5])
    assert not torch.equal(logits[0, :3], others[0, :3])
    assert torch.equal(gradient, other_gradient)
    assert not gradient[A].any()


def test_padding_sees_nothing_and_changes_nothing() -> None:
    stage = plain(SPARSE)
    tokens = torch.tensor([A + B + [0, 0]])
    documents = torch.tensor([[0] * 3 + [1] * 5 + [-1] * 2])
    ordinals = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0, 0]])
    found = []
    for filler in (0, 15):
        tokens[0, 8:] = filler
        returned = as_stage_output(
            stage(tokens_BS=tokens, documents_BS=documents, ordinals_BS=ordinals)
        )
        found.append((returned.output[0, :8], returned.losses["experts"]))

    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("context", "cp", "shape"),
    [
        ("ring", 2, ROTARY),
        ("ulysses", 2, LEARNED),
        ("gathered", 3, ROTARY),
        ("hybrid", 4, ROTARY),
        ("ring", 2, SPARSE),
    ],
)
def test_documents_over_context_ranks_are_those_of_whole_sequences(
    context: str, cp: int, shape: ModelShape
) -> None:
    tokens = torch.arange(26).view(2, 13) % 16
    documents = torch.tensor([[0] * 5 + [1] * 7 + [-1], [0] * 2 + [1] * 3 + [2] * 8])
    ordinals = Documents.of(documents).positions()
    serial = plain(shape)
    right = as_stage_output(serial(tokens_BS=tokens, documents_BS=documents, ordinals_BS=ordinals))
    objective(right.output, right.losses, documents).backward()

    def work(world: Communicator) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        mesh = Mesh(world, MeshShape(cp=cp))
        part = SequencePart(ContextLayout("zigzag", 13, cp), mesh.communicator("cp"))
        layers = TensorParallelLayers(mesh, None, part.attention(context))
        runner = recompute_all(captures=[capture_routing])
        stage = build_stage(shape, layers, range(shape.layers), runner).double()
        stage.load_state_dict(serial.state_dict())
        positions = part.positions()
        returned = as_stage_output(
            stage(
                tokens_BS=part.take(tokens),
                positions_S=positions,
                documents_BS=documents,
                ordinals_BS=part.take(ordinals),
            )
        )
        objective(returned.output, returned.losses, part.take(documents)).backward()
        gradients = {name: weight.grad for name, weight in stage.named_parameters()}
        return positions, returned.output.detach(), gradients

    ranks = LocalWorld(cp, timeout_s=60.0).run(work)

    for positions, output, _ in ranks:
        real = documents[:, positions] >= 0
        wanted = right.output.detach()[:, positions]
        torch.testing.assert_close(output[real], wanted[real], rtol=0, atol=1e-11)
    for name, weight in serial.named_parameters():
        total = sum(gradients[name] for _, _, gradients in ranks)
        torch.testing.assert_close(total, weight.grad, rtol=1e-10, atol=1e-11, msg=name)


def objective(
    output: torch.Tensor, losses: dict[str, torch.Tensor], documents: torch.Tensor
) -> torch.Tensor:
    """Return a sum over tokens that are not padding, in which every logit counts."""
    real = output[documents >= 0]
    return sum(losses.values(), real.square().sum() + real.sum())


def test_documents_without_their_own_positions_are_refused() -> None:
    tokens = torch.tensor([A + B])
    with pytest.raises(ConfigError, match="without ordinals_BS"):
        plain(ROTARY)(tokens_BS=tokens, documents_BS=torch.zeros_like(tokens))


def test_sequences_beyond_a_sliding_window_are_refused() -> None:
    stage = plain(attrs.evolve(ROTARY, window=8))
    stage(tokens_BS=torch.tensor([A + B]))
    with pytest.raises(ConfigError, match="9 positions are longer than the model's sliding window"):
        stage(tokens_BS=torch.tensor([[*A, *B, 9]]))
