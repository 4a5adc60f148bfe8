"""What guards take of a step of the tiny model."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn

from trainwright.stability_guards import (
    Report,
    State,
    all_guards,
    checksums,
)
from trainwright.stability_guards.curves import healthy

CHECK_EVERY = 100  # steps from one comparison of replicas to the next
MOST_SHARE = 0.01


def measure_cost(rounds: int) -> dict[str, Any]:
    """Time a training step of a tiny transformer, an update of all guards, and checksums."""
    torch.manual_seed(0)
    model = _tiny()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(256, (8, 129))
    step, guard, check = [], [], []
    judge = _judged()
    named = dict(model.named_parameters())
    for _ in range(rounds):
        step.append(_seconds(lambda: _train(model, optimizer, tokens), 3))
        guard.append(_seconds(judge, 200))
        check.append(_seconds(lambda: checksums(named).tolist(), 3))
    step_s, guard_s, check_s = map(statistics.median, (step, guard, check))
    share = (guard_s + check_s / CHECK_EVERY) / step_s
    return {
        "weights": sum(p.numel() for p in model.parameters()),
        "step_s": step_s,
        "guards_s": guard_s,
        "checksums_s": check_s,
        "share": share,
        "met": share < MOST_SHARE,
    }


def describe_cost(found: dict[str, Any]) -> str:
    """Return the times as text."""
    met = "met" if found["met"] else "MISSED"
    return (
        f"a step of {found['weights'] / 1e6:.2f} M weights {found['step_s'] * 1e3:.2f} ms; all "
        f"guards {found['guards_s'] * 1e6:.1f} us; checksums {found['checksums_s'] * 1e3:.3f} ms, "
        f"every {CHECK_EVERY} steps: {found['share']:.3%} of a step, target below "
        f"{MOST_SHARE:.0%}: {met}"
    )


class _Tiny(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return nn.functional.linear(hidden, self.embedding.weight)


def _tiny() -> _Tiny:
    return _Tiny(width=128, layers=4)


def _train(model: _Tiny, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _judged() -> Any:
    guard = all_guards()
    reports = [
        Report(r.step, r.loss, r.norm, signals={"update_ratio": 1e-3, "logit_max": 20.0})
        for r in healthy(0, 2000).reports()
    ]
    state: State = guard.initial()
    for report in reports:
        state, _ = guard.update(state, report)
    place = 0

    def judge() -> None:
        nonlocal state, place
        state, _ = guard.update(state, reports[place % len(reports)])
        place += 1

    return judge


def _seconds(call: Any, times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times
