"""Runs of any optimizer in a layout, and the same updates by torch's own on the plain model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from tests.layouts import Shard, join, observe_gradients
from tests.serial import text
from trainwright.collectives import Communicator, LocalWorld
from trainwright.integration.config import RunConfig
from trainwright.integration.model import ExpertShape, ModelShape
from trainwright.integration.optimizers import Factory, OptimizerPlan
from trainwright.integration.parts import assemble
from trainwright.integration.recipe import StepRecord, train
from trainwright.sharding.expert import Routing

SMALL = ModelShape(width=16, layers=2, heads=4, kv_heads=2, mlp_width=24)
SPARSE = ModelShape(
    width=16, layers=2, heads=4, kv_heads=4, experts=ExpertShape(Routing(4, 2), width=16)
)
Named = dict[str, nn.Parameter]
ADAM = {"betas": (0.9, 0.95), "eps": 1e-8}
CHOSEN = Factory | OptimizerPlan | None


def settings(**changes: Any) -> RunConfig:
    """Return settings of few short steps in float64."""
    base = RunConfig.of(
        steps=3, global_batch=8, microbatches=1, sequence_length=9, warmup=1, sample_bytes=0
    )
    return base.evolve(dtype="float64", **changes)


def shape_of(config: RunConfig) -> ModelShape:
    """Return a small model of the kind that the settings name."""
    base = SMALL if config.model.shape.experts is None else SPARSE
    return attrs.evolve(base, tied=config.model.shape.tied)


@attrs.frozen(eq=False)
class Update:
    """What a step did: all tensors whole, by name."""

    lr: float
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def updates_in_layout(config: RunConfig, chosen: CHOSEN = None) -> list[Update]:
    """Train from the start on rank threads; the first entry is the initial weights."""

    def work(comm: Communicator) -> list[tuple[StepRecord, dict[str, Shard]]]:
        parts = assemble(config, comm, text(), shape_of(config), optimizer=chosen)
        gradients = observe_gradients(parts)
        kept: list[tuple[StepRecord, dict[str, Shard]]] = []

        def observe(record: StepRecord | None) -> None:
            pieces = parts.model.pieces
            shards = {
                name: Shard(
                    piece.spec,
                    gradients.get(name, torch.zeros_like(piece.parameter)),
                    piece.parameter.detach().clone(),
                )
                for name, piece in pieces.items()
            }
            kept.append((record, shards))  # type: ignore[arg-type]

        observe(None)
        train(parts, parts.start(), [observe])
        return kept

    ranks = LocalWorld(config.parallel.mesh.world_size, timeout_s=60.0).run(work)
    found: list[Update] = []
    for step in zip(*ranks, strict=True):
        record = step[0][0]
        whole = join([(record or _NO_STEP, shards) for record, shards in step])
        lr = 0.0 if record is None else record.lr
        found.append(Update(lr, whole.gradients, whole.weights))
    return found


_NO_STEP = StepRecord(step=0, loss=0.0, grad_norm=0.0, lr=0.0, tokens=0, seconds=0.0, verdict=None)  # type: ignore[arg-type]


class PaperLion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al., line by line."""

    def __init__(self, params: Any, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": 1e-4, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                state, gradient = self.state[weight], weight.grad
                momentum = state.get("exp_avg", torch.zeros_like(weight))
                direction = torch.sign(first * momentum + (1 - first) * gradient)
                weight -= group["lr"] * (direction + group["weight_decay"] * weight)
                state["exp_avg"] = second * momentum + (1 - second) * gradient


def assert_same_updates(
    found: list[Update], oracle: Callable[[Named], list[torch.optim.Optimizer]]
) -> None:
    """Check each update against what plain optimizers make of the same gradients."""
    plain = {name: nn.Parameter(weight.clone()) for name, weight in found[0].weights.items()}
    optimizers = oracle(plain)
    for number, update in enumerate(found[1:]):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = update.lr
        for name, parameter in plain.items():
            give_gradient(parameter, update.gradients[name])
        for optimizer in optimizers:
            optimizer.step()
        for name, parameter in plain.items():
            right = parameter.detach()
            apart = float((update.weights[name] - right).abs().max() / right.abs().max())
            assert apart <= 1e-12, f"update {number} of {name}: {apart:.1e} apart"
    changed = {n for n, p in plain.items() if not torch.equal(p.detach(), found[0].weights[n])}
    assert changed == set(plain)


def give_gradient(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Give a parameter its gradient, and its slices theirs where these are updated apart."""
    parameter.grad = gradient.clone()
    for index, part in enumerate(getattr(parameter, "slices", ())):
        part.grad = gradient[index].clone()


def slices_of(parameter: nn.Parameter) -> list[nn.Parameter]:
    """Return the matrices of a stack as parameters that share its memory."""
    parts = [nn.Parameter(part) for part in parameter.detach()]
    parameter.slices = parts  # type: ignore[attr-defined]
    return parts


def by_dims(
    named: Mapping[str, nn.Parameter], weight_decay: float, names: Iterable[str] | None = None
) -> list[dict[str, Any]]:
    """Return groups of matrices, which decay, and of vectors, which do not."""
    chosen = [named[name] for name in (named if names is None else names)]
    return [
        {"params": [p for p in chosen if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in chosen if p.dim() < 2], "weight_decay": 0.0},
    ]


def adamw(named: Named, names: list[str] | None = None) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(by_dims(named, 0.1, names), **ADAM, foreach=False)]


def adam(named: Named) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(by_dims(named, 0.0), **ADAM, foreach=False)]


def sgd(named: Named) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(by_dims(named, 0.0), momentum=0.9, foreach=False)]


def lion(named: Named) -> list[torch.optim.Optimizer]:
    return [PaperLion(by_dims(named, 0.1))]


def adafactor(named: Named) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adafactor(by_dims(named, 0.1), foreach=False)]


def muon(named: Named) -> list[torch.optim.Optimizer]:
    hidden = [n for n, p in named.items() if ".layers." in n and p.dim() > 1]
    matrices = [
        each for n in hidden for each in (slices_of(named[n]) if named[n].dim() > 2 else [named[n]])
    ]
    options: dict[str, Any] = {"momentum": 0.95, "nesterov": True, "weight_decay": 0.1}
    return [
        torch.optim.Muon(matrices, **options, adjust_lr_fn="match_rms_adamw"),
        *adamw(named, [n for n in named if n not in hidden]),
    ]


ORACLES: dict[str, Callable[[Named], list[torch.optim.Optimizer]]] = {
    "adamw": adamw,
    "adam": adam,
    "sgd": sgd,
    "lion": lion,
    "adafactor": adafactor,
    "muon": muon,
}
