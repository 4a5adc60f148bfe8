"""What plans take when they are carried out, next to what they said: profiled, planned, run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trainwright.checkpointing.activations import (
    apply,
    codec_named,
    keep_all,
    measure,
    recompute_all,
    selective,
)
from trainwright.checkpointing.activations.planning import ChainCosts, Compress
from trainwright.checkpointing.activations.planning.chain import plan_chain
from trainwright.checkpointing.activations.planning.profile import profile
from trainwright.checkpointing.activations.planning.simulate import simulate_chain

# Shapes: B batch, S sequence, D model.

BATCH, SEQUENCE, WIDTH, HEADS = 4, 128, 512, 8
INNER = (1024, 2048, 3072, 2048, 1024, 2048)  # of the MLPs: layers differ
STEPS = 100  # sizes of memory told apart; planning itself is timed elsewhere
MOST_OFF = 0.05
MOST_SHARE = 0.5
CODECS = ("int8", "bf16")


def measure_applied(rounds: int) -> dict[str, Any]:
    """Time full and selective recomputation and three plans against keeping all, in turn."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(_Block(inner) for inner in INNER))
    x_BSD = torch.randn(BATCH, SEQUENCE, WIDTH)
    costs = profile(layers, x_BSD.clone().requires_grad_(), repeats=3)
    assert isinstance(costs, ChainCosts)
    everything = costs.input_bytes + sum(each.saved_bytes for each in costs.layers)
    offered = ChainCosts(costs.layers, costs.input_bytes, [_speed_of(name) for name in CODECS])
    plans = {
        "plan, 60%": (plan_chain(costs, int(0.6 * everything), steps=STEPS), costs),
        "plan, 40%": (plan_chain(costs, int(0.4 * everything), steps=STEPS), costs),
        "plan that may compress, 60%": (
            plan_chain(offered, int(0.6 * everything), steps=STEPS),
            offered,
        ),
    }
    contestants: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "keep all": lambda x: keep_all()(layers, x),
        "full": lambda x: recompute_all()(layers, x),
        "selective": lambda x: selective()(layers, x),
    }
    contestants |= {name: apply(layers, plan) for name, (plan, _) in plans.items()}
    times = _in_turn(list(contestants.values()), x_BSD, rounds)
    # The quickest of all rounds: what else the machine does only ever adds.
    quickest = [min(column) for column in zip(*times, strict=True)]
    ratios = {name: one / quickest[0] for name, one in zip(contestants, quickest, strict=True)}
    keeping_s = sum(each.forward_s + each.backward_s for each in costs.layers)
    rows = []
    for name, (plan, of) in plans.items():
        said = simulate_chain(plan, of).time_s / keeping_s
        peak = _peak(contestants[name], layers, x_BSD)
        budget = plan.claims.budget_bytes if plan.claims else 0
        rows.append(
            {
                "name": name,
                "plan": str(plan),
                "said": said,
                "took": ratios[name],
                "off": ratios[name] / said - 1,
                "peak_bytes": peak,
                "budget_bytes": budget,
            }
        )
    share = (ratios["selective"] - 1) / (ratios["full"] - 1)
    return _judged(ratios, rows, share)


def describe_applied(found: dict[str, Any]) -> str:
    """Return ratios and targets as text."""
    lines = [f"{'contestant':30} time / keep all"]
    lines += [f"{name:30} {ratio:.3f}" for name, ratio in found["ratios"].items()]
    for row in found["plans"]:
        lines.append(
            f"{row['name']}: [{row['plan']}] said {row['said']:.3f}, took {row['took']:.3f} "
            f"({row['off']:+.1%}); peak {row['peak_bytes'] / 2**20:.1f} of "
            f"{row['budget_bytes'] / 2**20:.1f} MiB"
        )
    for name, met in found["targets"].items():
        lines.append(f"{name}: {'met' if met else 'MISSED'}")
    return "\n".join(lines)


def _judged(ratios: dict[str, float], rows: list[dict[str, Any]], share: float) -> dict[str, Any]:
    compressing = next(row for row in rows if "compress" in row["name"])
    recomputing = next(row for row in rows if row["name"] == "plan, 60%")
    chosen = "@" in compressing["plan"]
    targets = {
        f"each plan within {MOST_OFF:.0%} of what it said": all(
            abs(row["off"]) <= MOST_OFF for row in rows
        ),
        "each plan within its budget": all(
            row["peak_bytes"] <= row["budget_bytes"] for row in rows
        ),
        f"selective: {share:.0%} of full's extra time, below {MOST_SHARE:.0%}": share < MOST_SHARE,
    }
    if chosen:
        targets["where a plan compresses, it takes less than recomputing"] = (
            compressing["took"] < recomputing["took"]
        )
    met = all(targets.values())
    return {"ratios": ratios, "plans": rows, "targets": targets, "share": share, "met": met}


class _Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norms[0](x_BSD)).view(BATCH, SEQUENCE, 3, HEADS, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSD = x_BSD + self.out(y.transpose(1, 2).reshape(BATCH, SEQUENCE, WIDTH))
        inner = F.gelu(self.up(self.norms[1](x_BSD)), approximate="tanh")
        output: torch.Tensor = x_BSD + self.down(inner)
        return output


def _step(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    source = x.clone().requires_grad_()
    start = time.perf_counter()
    call(source).sum().backward()  # type: ignore[no-untyped-call]
    return time.perf_counter() - start


def _in_turn(calls: Sequence[Any], x: torch.Tensor, rounds: int) -> list[list[float]]:
    for call in calls:
        _step(call, x)
    return [[_step(call, x) for call in calls] for _ in range(rounds)]


def _peak(call: Callable[[torch.Tensor], torch.Tensor], layers: nn.Module, x: torch.Tensor) -> int:
    source = x.clone().requires_grad_()
    with measure(layers.parameters()) as saved:
        loss = call(source).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return saved.peak_bytes


def _speed_of(name: str) -> Compress:
    codec = codec_named(name)
    sample = torch.randn(BATCH, SEQUENCE, 4 * WIDTH)
    num_bytes = sample.numel() * sample.element_size()
    parts = codec.encode(sample)
    encode, decode = [], []
    for _ in range(5):
        start = time.perf_counter()
        parts = codec.encode(sample)
        middle = time.perf_counter()
        codec.decode(parts, sample.shape, sample.dtype)
        encode.append(middle - start)
        decode.append(time.perf_counter() - middle)
    kept = sum(part.numel() * part.element_size() for part in parts)
    speeds = (num_bytes / statistics.median(encode), num_bytes / statistics.median(decode))
    return Compress(name, kept / num_bytes, *speeds)
