"""Faults of guards, recovery, rates and ramps."""

from __future__ import annotations

from tools.mutants.faults import INTEGRATION, Fault

GUARDS = "packages/stability-guards/src/trainwright/stability_guards"
TESTS = "integration/tests"

FAULTS_OF_GUARDS = (
    Fault(
        "weight decay stays what it was at the first update",
        f"{INTEGRATION}/recipe.py",
        "    parts.move_decay(progress.updates)",
        "    parts.move_decay(0)",
        (f"{TESTS}/test_rates.py", "-k", "moving_weight_decay"),
    ),
    Fault(
        "the plateau of warmup-stable-decay is part of its fall",
        f"{INTEGRATION}/rates.py",
        "peak, rise, steps, fall, floor",
        "peak, rise, steps, steps - rise, floor",
        (f"{TESTS}/test_rates.py", "-k", "each_schedule"),
    ),
    Fault(
        "a skipped batch moves the ramp on",
        f"{INTEGRATION}/ramping.py",
        "        self._updates -= 1",
        "        self._updates -= 0",
        (f"{TESTS}/test_ramping.py", "-k", "skipped"),
    ),
    Fault(
        "a resumed ramp begins anew",
        f"{INTEGRATION}/training_state.py",
        '    parts.feed.count_from(run["updates"])',
        "    parts.feed.count_from(0)",
        (f"{TESTS}/test_ramping.py", "-k", "resumes"),
    ),
    Fault(
        "biases of experts are not put back by a rollback",
        f"{INTEGRATION}/balancing.py",
        "            bias.copy_(state[name])",
        "            bias.copy_(bias)",
        (f"{TESTS}/test_model_measures.py", "-k", "going_back"),
    ),
    Fault(
        "biases of experts move by the choices of this rank's tokens",
        "packages/sharding/src/trainwright/sharding/expert/balance.py",
        '    mesh.communicator("dp", "cp", "tp").all_reduce(chosen).wait()',
        '    mesh.communicator("dp", "cp", "tp").all_reduce(chosen.clone()).wait()',
        (f"{TESTS}/test_model_measures.py", "-k", "biases_move"),
    ),
    Fault(
        "the z-loss is forgotten where the vocabulary is cut",
        f"{INTEGRATION}/model/parallel_layers.py",
        "z_loss=z_loss",
        "z_loss=0.0",
        (f"{TESTS}/test_model_measures.py", "-k", "first_step"),
    ),
    Fault(
        "the embedding's gradient is not shrunk",
        f"{INTEGRATION}/model/decoder.py",
        'self._shrink(self.model["embed_tokens"](tokens_BS))',
        '_whole_gradient(self.model["embed_tokens"](tokens_BS))',
        (f"{TESTS}/test_model_measures.py", "-k", "first_step"),
    ),
    Fault(
        "the bound on attention's logits is that of this rank's tokens",
        f"{INTEGRATION}/signals.py",
        "all_reduce(packed, ReduceOp.MAX).wait()\n        by_place",
        "all_reduce(packed.clone(), ReduceOp.MAX).wait()\n        by_place",
        (f"{TESTS}/test_signals.py", "-k", "same_on_every_rank and cp"),
    ),
    Fault(
        "keys of a head above the bound are shrunk by all of it",
        f"{INTEGRATION}/head_clipping.py",
        '(("q_proj", q_H), ("k_proj", k_K))',
        '(("q_proj", q_H), ("k_proj", k_K * k_K))',
        (f"{TESTS}/test_head_clipping.py", "-k", "published_factors"),
    ),
    Fault(
        "a head's largest logit is that of this rank's sequences",
        f"{INTEGRATION}/head_clipping.py",
        "        same.all_reduce(found_LH, ReduceOp.MAX).wait()",
        "        same.all_reduce(found_LH.clone(), ReduceOp.MAX).wait()",
        (f"{TESTS}/test_head_clipping.py", "-k", "every_layout"),
    ),
    Fault(
        "a journal that cannot be written stops rank 0 alone",
        f"{GUARDS}/journal.py",
        "        problem = broadcast_object(self._communicator, problem, root=0)",
        '        broadcast_object(self._communicator, "", root=0)',
        ("packages/stability-guards/tests/test_journal.py", "-k", "cannot_write"),
    ),
    Fault(
        "snapshots beyond the budget of one rank stop it alone",
        f"{GUARDS}/snapshots.py",
        "self._communicator.all_reduce(most, ReduceOp.MAX).wait()",
        "self._communicator.all_reduce(most.clone(), ReduceOp.MAX).wait()",
        ("packages/stability-guards/tests/test_snapshots.py", "-k", "budget"),
    ),
    Fault(
        "two steps up within a window are taken for a divergence",
        f"{GUARDS}/trends.py",
        "or two <= 0.2 * self.trend * unit",
        "or two <= -unit",
        ("packages/stability-guards/tests/test_trend_guards.py", "-k", "two_steps_up"),
    ),
)
