"""The serial run: one process, plain modules, plain PyTorch. What every layout must compute."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import attrs
import numpy as np
import torch
import torch.nn.functional as F

from trainwright.checkpointing.activations import keep_all
from trainwright.integration.config import RunConfig
from trainwright.integration.data import Corpus, Reader
from trainwright.integration.model import (
    ExpertShape,
    ModelShape,
    PlainLayers,
    build_stage,
    initialize_,
)
from trainwright.pipeline_schedules.execute.output import as_stage_output
from trainwright.sharding import placements_of
from trainwright.sharding.expert import Routing

LICENSE = Path(__file__).parents[1] / "LICENSE"
GROUPED = ModelShape(width=32, layers=8, heads=8, kv_heads=4, mlp_width=64)
"""Its key/value heads tp=8 cannot share out, and its other sizes tp=3, 5, 6 and 7 do not divide."""

SPARSE = ModelShape(
    width=32,
    layers=4,
    heads=8,
    kv_heads=4,
    experts=ExpertShape(Routing(8, 2), width=24, shared_width=24, balance=0.1, z=0.01),
)
"""A mixture of experts whose auxiliary losses are large enough to be seen."""


def text() -> Corpus:
    """Return the licence as a corpus: real text that is always there, and always the same."""
    stream = np.frombuffer(LICENSE.read_bytes(), dtype=np.uint8)
    return Corpus(
        train=stream[:-1000], held_out=stream[-1000:], files=1, skipped=(), source=str(LICENSE)
    )


def settings(**changes: object) -> RunConfig:
    """Return the settings of the law's runs: the default learning rate, few short sequences."""
    base = RunConfig.of(
        steps=51, global_batch=24, microbatches=1, sequence_length=17, warmup=5, sample_bytes=0
    )
    return base.evolve(**changes)


@attrs.frozen(eq=False)
class Snapshot:
    """The whole state before a step."""

    step: int
    weights: dict[str, torch.Tensor]
    first_moments: dict[str, torch.Tensor]
    second_moments: dict[str, torch.Tensor]


@attrs.frozen(eq=False)
class Outcome:
    """What one step computed: gradients are those after clipping."""

    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


@attrs.frozen(eq=False)
class Gradients:
    """What one forward and backward pass computed: gradients are those after clipping."""

    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]


class SerialRun:
    """Forward, backward, clip and AdamW written out with torch alone."""

    def __init__(self, shape: ModelShape, config: RunConfig, splits: int = 1) -> None:
        self.config = config
        self.splits = splits
        self.model = build_stage(shape, PlainLayers(), range(shape.layers), keep_all())
        self.model.to(torch.float64 if config.dtype == "float64" else torch.float32)
        initialize_(self.model, placements_of(self.model), shape, config.seed)
        samples = text().samples(config.batch.sequence_length, config.seed)
        self.reader = Reader(samples, config.sizes.global_batch)
        named = dict(self.model.named_parameters())
        matrices = [p for p in named.values() if p.dim() > 1]
        vectors = [p for p in named.values() if p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.optimizer.decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
            eps=1e-8,
        )
        self.named = named
        self.step_index = 0

    def snapshot(self) -> Snapshot:
        """Return copies of weights and moments."""
        state = self.optimizer.state
        return Snapshot(
            step=self.step_index,
            weights={n: p.detach().clone() for n, p in self.named.items()},
            first_moments={n: _moment(state[p], "exp_avg", p) for n, p in self.named.items()},
            second_moments={n: _moment(state[p], "exp_avg_sq", p) for n, p in self.named.items()},
        )

    @torch.no_grad()
    def load(self, state: Snapshot) -> None:
        """Go on from another run's state, of any dtype."""
        self.take(state.weights, state.step)
        for name, parameter in self.named.items():
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(state.step)),
                "exp_avg": state.first_moments[name].to(parameter.dtype),
                "exp_avg_sq": state.second_moments[name].to(parameter.dtype),
            }

    @torch.no_grad()
    def take(self, weights: Mapping[str, torch.Tensor], step: int) -> None:
        """Stand before a step with these weights, of any dtype."""
        for name, parameter in self.named.items():
            parameter.copy_(weights[name])
        self.step_index = step
        self.reader.load_state_dict({"consumed": step * self.config.sizes.global_batch})

    def gradients(self) -> Gradients:
        """Run the next batch forward and backward."""
        batch = self.reader.next_batch()
        tokens, labels = batch.tokens_MBS[0], batch.labels_MBS[0]
        loss_sum = 0.0
        for part in torch.arange(len(tokens)).chunk(self.splits):
            returned = as_stage_output(self.model(tokens_BS=tokens[part]))
            # The plain model is ours too: that it has these losses at all is checked here.
            assert bool(returned.losses) == (self.model.shape.experts is not None)
            logits = returned.output.flatten(0, 1)
            loss = F.cross_entropy(logits, labels[part].flatten(), reduction="sum")
            (sum(returned.losses.values(), loss) / labels.numel()).backward()
            loss_sum += float(loss.detach())
        raw = {name: p.grad for name, p in self.named.items()}
        for parameter in self.named.values():
            parameter.grad = None
        return clipped(loss_sum / labels.numel(), raw, self.config.optimizer.clip)

    def step(self) -> Outcome:
        """Make one step."""
        made = self.gradients()
        for name, parameter in self.named.items():
            parameter.grad = made.gradients[name].clone()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, self.step_index)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_index += 1
        weights = {n: p.detach().clone() for n, p in self.named.items()}
        return Outcome(made.loss, made.norm, made.gradients, weights)


def clipped(loss: float, raw: Mapping[str, torch.Tensor | None], most: float) -> Gradients:
    """Return a loss and gradients, which are shrunk to a norm of at most ``most``."""
    squares = [g.double().square().sum() for g in raw.values() if g is not None]
    norm = math.sqrt(float(torch.stack(squares).sum()))
    factor = min(1.0, most / (norm + 1e-6))
    return Gradients(loss, norm, {name: g * factor for name, g in raw.items()})


def learning_rate(config: RunConfig, step: int) -> float:
    """Return the rate of an update: linear warm-up, then a cosine down to a tenth of the peak."""
    peak, warmup, total = config.optimizer.lr, config.rate.warmup, config.steps
    if step < warmup:
        return peak * (step + 1) / warmup
    share = (step - warmup) / (total - warmup)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)))


def _moment(state: dict[str, torch.Tensor], name: str, like: torch.Tensor) -> torch.Tensor:
    return state[name].clone() if state else torch.zeros_like(like)
