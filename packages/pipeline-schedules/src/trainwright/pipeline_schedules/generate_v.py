"""Schedules over a V: each rank holds one chunk on the way down and one on the way back up."""

from __future__ import annotations

import numpy as np

from trainwright.pipeline_schedules.actions import Kind
from trainwright.pipeline_schedules.schedule import Rows, Schedule
from trainwright.pipeline_schedules.turns import in_turn, joined, require_positive

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741  (the literature's letter)


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """ZB-V: no bubble at F = I = W with the memory of 1F1B, on two chunks a rank.

    Rank r holds stages r and ``2 ranks - 1 - r``, so that a microbatch's loss is on the rank that
    starts it and its first gradient there soon. At F = I = W of every chunk and from ``2 ranks -
    1`` microbatches on, no rank waits between its first and last action (the span is the work; the
    makespan has ``ranks - 1`` forwards of a chunk more), and no rank holds more than ``2 ranks``
    chunks' activations, as much as 1F1B's first stage. With fewer microbatches it is the same
    order without those that are not there.

    Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 6 and figure 5;
    Pipeline Parallelism with Controllable Memory (arXiv:2405.15362).
    """
    require_positive(ranks=ranks, microbatches=microbatches)
    actions = [_zb_v_rows(rank, ranks, microbatches) for rank in range(ranks)]
    return Schedule(actions, _v_shape(ranks), microbatches, "zb-v")


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipe-V: forwards of one chunk overlap with backwards of the other, on a V.

    Pairs (F_PAIRED and the B below it) are blocks in which the all-to-all transfers of experts can
    hide. In costs of a chunk, B the whole backward and F&B a pair, the rank at the tip of the V,
    which idles most, idles ``(ranks - 1) (F&B + B - 3 W)`` where F = I (less where I is larger,
    because the tip's first forward and backward are no pair, as in DeepSeek's program); so it pays
    where F&B is less than F + B. A rank holds up to ``2 ranks + 1`` chunks' activations. All that
    from ``2 ranks`` microbatches on; with fewer it is the same order without those that are not
    there.

    Source: DeepSeek-AI, DeepSeek-V3 (arXiv:2412.19437), section 3.2.1, and DualPipe's
    ``dualpipev.py``; Qi et al., DualPipe could be better without the Dual (Sea AI Lab, 2025).
    """
    require_positive(ranks=ranks, microbatches=microbatches)
    actions = [_dualpipe_v_rows(rank, ranks, microbatches) for rank in range(ranks)]
    return Schedule(actions, _v_shape(ranks), microbatches, "dualpipe-v")


def _v_shape(ranks: int) -> list[int]:
    return [*range(ranks), *reversed(range(ranks))]


def _zb_v_rows(rank: int, ranks: int, microbatches: int) -> Rows:
    down, up = rank, 2 * ranks - 1 - rank
    after = ranks - rank  # ranks from this one to the tip of the V
    number = max(microbatches, 2 * ranks - 1)
    steady = [
        *((F, down, ranks + after - 1), (I, down, 0), (W, down, 0)),
        *((F, up, ranks), (I, up, after), (W, up, after)),
    ]
    phases = [
        in_turn(2 * after - 1, [(F, down, 0)]),
        in_turn(rank, [(F, up, 0), (F, down, 2 * after - 1)]),
        in_turn(after, [(F, up, rank), (I, up, 0), (W, up, 0)]),
        in_turn(number - ranks, steady),
        in_turn(rank, [(I, down, number - ranks), (I, up, number - rank)]),
        in_turn(after, [(I, down, number - after), (W, down, number - ranks)]),
        in_turn(rank, [(W, up, number - rank)]),
        in_turn(rank, [(W, down, number - rank)]),
    ]
    return joined(phases, microbatches)


def _dualpipe_v_rows(rank: int, ranks: int, microbatches: int) -> Rows:
    """The eight steps of ``dualpipev.py``, named there by what one cycle of each holds."""
    down, up = rank, 2 * ranks - 1 - rank
    after = ranks - rank - 1
    number = max(microbatches, 2 * ranks)
    paired = Kind.F_PAIRED
    main = in_turn(
        number - 2 * ranks + rank + 1,
        [
            *((paired, down, ranks + after), (B, up, after)),
            *((paired, up, ranks), (B, down, 0)),
        ],
    )
    if after == 0:
        main[0, 0] = F  # the tip of the V has nothing to hide behind its first backward
    # The later half of the last backwards are split, and their weight gradients fill the end.
    last = in_turn(rank + 1, [(B, up, number - rank - 1), (B, down, number - ranks)])
    last[rank + 1 :, 0] = I
    split = np.concatenate([last[rank + 1 :], in_turn(after, [(I, down, number - after)])])
    weights = split.copy()
    weights[:, 0] = W
    phases = [
        in_turn(2 * after, [(F, down, 0)]),
        in_turn(rank + 1, [(F, down, 2 * after), (F, up, 0)]),
        in_turn(after, [(I, up, 0), (W, up, 0), (F, up, rank + 1)]),
        main,
        in_turn(
            after,
            [
                (B, up, number - ranks),
                (paired, up, number - after),
                (B, down, number - 2 * ranks + rank + 1),
            ],
        ),
        last,
        np.stack([weights[:after], split[rank + 1 :]], axis=1).reshape(-1, 3),
        weights[after:],
    ]
    return joined(phases, microbatches)
