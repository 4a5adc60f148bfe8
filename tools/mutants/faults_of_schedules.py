"""Faults of schedules: several stages a rank, and backwards that come in two parts."""

from __future__ import annotations

from tools.mutants.faults import EXECUTE, INTEGRATION, ONE_STEP, TENSOR, Fault

TESTS = "packages/pipeline-schedules/tests"
ON_A_V = ("tests/test_law.py", "-k", f"{ONE_STEP} and dp2-tp2-pp2")
IN_LOOPS = ("tests/test_law.py", "-k", f"{ONE_STEP} and dp2-pp2")
SPLIT = (f"{TESTS}/test_executor_split.py",)
OWING = (f"{TESTS}/test_executor_owing.py",)
HALVES = ("packages/sharding/tests/tensor/test_split_products.py",)

FAULTS_OF_SCHEDULES = (
    Fault(
        "a rank's stages have each other's layers",
        f"{INTEGRATION}/sharded.py",
        "build_stage(shape, layers, blocks[number], runner)",
        "build_stage(shape, layers, blocks[number ^ 2 if number ^ 2 < len(blocks) else number], "
        "runner)",
        IN_LOOPS,
    ),
    Fault(
        "the ends of a V have an embedding each",
        f"{INTEGRATION}/sharded.py",
        "        tie(stages[first], stages[last])\n",
        "        pass\n",
        ON_A_V,
    ),
    Fault(
        "an embedding that both ends of a V share is summed over the pipeline too",
        f"{INTEGRATION}/sharded.py",
        "offload, len(members) == 2, drawn",
        "offload, False, drawn",
        ON_A_V,
    ),
    Fault(
        "only the first of a rank's stages reduces its gradients",
        f"{INTEGRATION}/stepping.py",
        "        reducers=model.parallel if parallel.overlap else",
        "        reducers=dict(list(model.parallel.items())[:1]) if parallel.overlap else",
        IN_LOOPS,
    ),
    Fault(
        "gradients that stay on a rank go to the stage before in another order",
        f"{EXECUTE}/run.py",
        "            self._gradients[stage - 1, microbatch] = passed_on\n",
        "            self._gradients[stage - 1, microbatch] = [g.flip(0) for g in passed_on]\n",
        SPLIT,
    ),
    Fault(
        "a bias gets the gradient of the first row alone",
        f"{EXECUTE}/operations.py",
        "            of_bias = rows.sum(0)\n",
        "            of_bias = rows[0].clone()\n",
        SPLIT,
    ),
    Fault(
        "weight gradients that are never computed pass in silence",
        f"{EXECUTE}/weight_gradients.py",
        "        if not self._owed:\n            return\n",
        "        if True:\n            return\n",
        OWING,
    ),
    Fault(
        "of what a microbatch owes only the largest products are paid",
        f"{EXECUTE}/weight_gradients.py",
        "for debt in self._owed.pop(slot, []) if",
        "for debt in self._owed.pop(slot, [])[:1] if",
        SPLIT,
    ),
    Fault(
        "weights that changed between forward and backward are taken as they are",
        f"{EXECUTE}/split.py",
        "        if _versions(self._weights) != self._versions:\n",
        "        if False:\n",
        OWING,
    ),
    Fault(
        "the input gradient of a product taken apart is not summed",
        f"{TENSOR}/products.py",
        "        return start_sum(terms, ctx.tp).finish(), None, None, None, None\n",
        "        return terms, None, None, None, None\n",
        HALVES,
    ),
    Fault(
        "products that share a gathered input each gather it for themselves",
        f"{TENSOR}/products.py",
        "            part = ctx.regather.take()\n",
        "            part = ctx.regather.take()\n            ctx.regather._whole = None\n",
        HALVES,
    ),
)
