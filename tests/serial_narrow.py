"""The serial run in few bits: plain modules under the same policy, one process, one thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch

from tests.serial import Gradients, Outcome, SerialRun, Snapshot, clipped, learning_rate
from trainwright.collectives import SingleCommunicator
from trainwright.integration.config import RunConfig
from trainwright.integration.model import ModelShape
from trainwright.pipeline_schedules.execute.output import as_stage_output
from trainwright.precision import policy
from trainwright.precision.float8 import Float8State, convert_linears
from trainwright.sharding.tensor import Cut, vocab_parallel_cross_entropy

Scales = Mapping[str, torch.Tensor]
KEPT_WIDE = ("*norm.weight", "*norm.bias", "*.mlp.gate.weight")
"""Norms and routers stay in FP32."""


@attrs.frozen(eq=False)
class NarrowOutcome:
    """What a step computed, and the FP8 scales that it left, by matrix."""

    outcome: Outcome
    scales: Scales


class NarrowSerialRun(SerialRun):
    """Weights in few bits are rounded from FP32 ones; gradients are summed in FP32.

    Its batch is taken in the parts that are a layout's microbatches: a matrix of a microbatch has
    scales of its own.

    Args:
        config: of the layout whose step is repeated here.
        loss_scale: what the loss is multiplied by.
    """

    def __init__(self, shape: ModelShape, config: RunConfig, loss_scale: float = 1.0) -> None:
        one = config.evolve(microbatches=1)
        super().__init__(shape, one, splits=config.parallel.mesh.dp * config.sizes.microbatches)
        self.loss_scale = loss_scale
        self.masters = {name: weight.detach().clone() for name, weight in self.named.items()}
        dtypes = policy(config.dtype, keep_fp32=KEPT_WIDE)
        for name, weight in self.named.items():
            weight.data = weight.data.to(dtypes.parameter_dtype(name, weight))
            weight.grad_dtype = torch.float32
        self.scales: Float8State | None = None
        if dtypes.recipe is not None:
            chosen = ("model.layers.*",)
            self.scales = convert_linears(self.model, dtypes.recipe, chosen, keep_ends=False)

    def load(self, state: Snapshot) -> None:
        """Begin at another run's state."""
        self.before = state
        self.take(state.weights, state.step)

    def gradients(self) -> Gradients:
        """Run the next batch forward and backward; `scales` are those of the next."""
        batch = self.reader.next_batch()
        tokens, labels = batch.tokens_MBS[0], batch.labels_MBS[0]
        seed = torch.tensor(self.loss_scale / labels.numel())
        loss_sum = 0.0
        for part in torch.arange(len(tokens)).chunk(self.splits):
            loss, besides = self._losses(tokens[part], labels[part])
            (loss + besides).backward(seed)
            loss_sum += float(loss.detach())
        if self.scales is not None:
            self.scales.end_step()
        raw = {name: weight.grad / self.loss_scale for name, weight in self.named.items()}
        for weight in self.named.values():
            weight.grad = None
        return clipped(loss_sum / labels.numel(), raw, self.config.optimizer.clip)

    def step(self) -> Outcome:
        """Make one step; `scales` are those of the next."""
        made = self.gradients()
        weights = self._updated(made.gradients)
        return Outcome(made.loss, made.norm, made.gradients, weights)

    def _losses(
        self, tokens: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        returned = as_stage_output(self.model(tokens_BS=tokens))
        logits = returned.output
        # What another order of its sums rounds differently would be rounded again in few bits.
        cut = Cut.whole(logits.shape[-1], 1)
        loss = vocab_parallel_cross_entropy(logits, labels, SingleCommunicator(), cut=cut).sum()
        return loss, sum(returned.losses.values())

    def _updated(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weights = {n: torch.nn.Parameter(w.clone()) for n, w in self.before.weights.items()}
        decay = self.config.optimizer.decay
        optimizer = torch.optim.AdamW(
            [
                {"params": [w], "weight_decay": decay if w.dim() > 1 else 0.0}
                for w in weights.values()
            ],
            lr=learning_rate(self.config, self.before.step),
            betas=(0.9, 0.95),
            eps=1e-8,
        )
        for name, weight in weights.items():
            weight.grad = gradients[name]
            optimizer.state[weight] = {
                "step": torch.tensor(float(self.before.step)),
                "exp_avg": self.before.first_moments[name].clone(),
                "exp_avg_sq": self.before.second_moments[name].clone(),
            }
        optimizer.step()
        return {name: weight.detach() for name, weight in weights.items()}


def narrow_steps(
    config: RunConfig, shape: ModelShape, states: Sequence[Snapshot], loss_scale: float = 1.0
) -> list[NarrowOutcome]:
    """Load serial states one after another and make a step after each."""
    run = NarrowSerialRun(shape, config, loss_scale)
    found = []
    for before in states:
        run.load(before)
        outcome = run.step()
        found.append(NarrowOutcome(outcome, {} if run.scales is None else run.scales.scales()))
    return found
