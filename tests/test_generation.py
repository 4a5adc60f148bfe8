"""What follows a prompt is what the plain model says, in every layout, with a cache or not."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch

from tests.equivalence.families import LATENT
from tests.serial import GROUPED, SPARSE, settings, text
from trainwright.checkpointing.activations import keep_all
from trainwright.collectives import Communicator, LocalWorld
from trainwright.integration.config import RunConfig
from trainwright.integration.errors import ConfigError
from trainwright.integration.generation import continuations
from trainwright.integration.model import (
    DecoderStage,
    ModelShape,
    PlainLayers,
    build_stage,
    initialize_,
)
from trainwright.integration.parts import assemble
from trainwright.integration.sampling import Sampling
from trainwright.pipeline_schedules.execute.output import as_stage_output
from trainwright.sharding import placements_of

TOLERANCE = 1e-12
NUM_TOKENS = 6
PROMPTS = (b"Licensor", b"of the License", b"You")
DENSE = attrs.evolve(GROUPED, layers=4)
TIED = attrs.evolve(DENSE, tied=True)
SHARED = attrs.evolve(DENSE, layers=2, kv_heads=2)
"""Four tensor-parallel ranks cannot share its key/value heads out."""
LEARNED = attrs.evolve(
    DENSE,
    kv_heads=8,
    tied=True,
    norm="layer",
    positions="learned",
    max_positions=17,
    activation="gelu_tanh",
    gated=False,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
)
NORMED = attrs.evolve(DENSE, qk_norm=True, qkv_bias=True, head_features=6)

Said = list[tuple[list[int | None], torch.Tensor]]
"""At each step the token of every row, and the logits of all rows."""

Seen = dict[tuple[int, int], torch.Tensor]
"""Logits by step and row."""


class Watched(Sampling):
    """Greedy, and remembers the logits that it was given, by row."""

    def __init__(self) -> None:
        super().__init__(temperature=0.0)
        object.__setattr__(self, "seen", {})

    def draw(self, logits_BV: torch.Tensor, rows_B: torch.Tensor, step: int) -> torch.Tensor:
        for row, logits_V in zip(rows_B.tolist(), logits_BV, strict=True):
            self.seen[step, row] = logits_V.clone()
        return super().draw(logits_BV, rows_B, step)


def said_in(config: RunConfig, shape: ModelShape, prompts: Sequence[bytes], **options: Any) -> Said:
    """Return what a layout says; of each row's logits all ranks that have them have the same."""

    def work(world: Communicator) -> tuple[list[list[int | None]], Seen]:
        parts = assemble(config, world, text(), shape)
        watched = Watched()
        tokens = list(continuations(parts, prompts, NUM_TOKENS, watched, **options))
        return tokens, watched.seen

    ranks = LocalWorld(config.parallel.mesh.world_size, timeout_s=60.0).run(work)
    tokens = ranks[0][0]
    assert all(other == tokens for other, _ in ranks)
    seen = {place: logits for _, each in ranks for place, logits in each.items()}
    rows = range(len(prompts))
    logits = [torch.stack([seen[step, row] for row in rows]) for step in range(len(tokens))]
    return list(zip(tokens, logits, strict=True))


@functools.cache
def said_plainly(shape: ModelShape, prompts: tuple[bytes, ...], window: int) -> Said:
    """Return what the plain model says, which reads each row alone and anew at each step."""
    model = build_stage(shape, PlainLayers(), range(shape.layers), keep_all()).double()
    initialize_(model, placements_of(model), shape, settings().seed)
    rows = [list(prompt) for prompt in prompts]
    said: Said = []
    for _ in range(NUM_TOKENS):
        with torch.no_grad():
            outputs = [model(tokens_BS=torch.tensor([row[-window:]])) for row in rows]
        logits = torch.stack([as_stage_output(output).output[0, -1] for output in outputs])
        tokens = logits.argmax(1).tolist()
        for row, token in zip(rows, tokens, strict=True):
            row.append(token)
        said.append((tokens, logits))
    return said


def assert_same(found: Said, wanted: Said) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    for (_, logits), (_, exact) in zip(found, wanted, strict=True):
        assert (logits - exact).abs().max() <= TOLERANCE * exact.abs().max()


LAYOUTS: list[tuple[dict[str, object], ModelShape]] = [
    ({"layout": "dp=1"}, DENSE),
    ({"layout": "tp=4", "sequence_parallel": True}, SHARED),
    ({"layout": "tp=2,pp=2", "schedule": "interleaved-1f1b"}, LEARNED),
    ({"layout": "cp=2,pp=2,ep=2"}, SPARSE),
    ({"layout": "dp=2", "zero": 3}, NORMED),
]
MORE: list[tuple[dict[str, object], ModelShape]] = [
    ({"layout": "tp=2"}, TIED),
    ({"layout": "tp=8", "sequence_parallel": True}, DENSE),
    ({"layout": "pp=2", "schedule": "zb-v"}, TIED),
    ({"layout": "cp=2", "context": "ulysses"}, NORMED),
    ({"layout": "dp=2,tp=2", "zero": 3}, DENSE),
    ({"layout": "dp=2,pp=2", "zero": 3, "gather": "action"}, TIED),
    ({"layout": "dp=2,tp=2,ep=4,etp=1", "sequence_parallel": True}, SPARSE),
    ({"layout": "tp=2,pp=2,ep=2,etp=1", "sequence_parallel": True}, LATENT),
]


@pytest.mark.parametrize(
    ("layout", "shape"),
    [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE)],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_a_layout_with_a_cache_says_what_the_plain_model_says(
    layout: dict[str, object], shape: ModelShape
) -> None:
    found = said_in(settings(dtype="float64", microbatches=2, **layout), shape, PROMPTS)

    assert_same(found, said_plainly(shape, PROMPTS, 17))


def test_with_a_cache_each_token_is_read_once_until_the_window_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[int] = []
    forward = DecoderStage.forward

    def counted(self: DecoderStage, *args: Any, tokens_BS: torch.Tensor, **inputs: Any) -> Any:
        read.append(tokens_BS.numel())
        return forward(self, *args, tokens_BS=tokens_BS, **inputs)

    monkeypatch.setattr(DecoderStage, "forward", counted)
    prompts = (b"Licensor", b"Lic")
    config = settings(dtype="float64", sequence_length=11)
    with_cache = said_in(config, DENSE, prompts)
    # The window holds what is drawn from 8, 9, 10 and 11 tokens; of 12 the last 11 are seen.
    assert read == [16, 2, 2, 2, 22, 22]

    read.clear()
    assert_same(said_in(config, DENSE, prompts, cached=False), with_cache)
    assert read == [16, 18, 20, 22, 22, 22]


def test_a_model_without_positions_for_a_window_refuses_it() -> None:
    with pytest.raises(ConfigError, match="cannot see 18 tokens at once; 1 to 17 work"):
        said_in(settings(), LEARNED, PROMPTS, window=18)
