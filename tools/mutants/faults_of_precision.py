"""Faults in the number formats of whole runs: scales of losses and of FP8 products."""

from __future__ import annotations

from tools.mutants.faults import INTEGRATION, Fault

PRECISION = "packages/precision/src/trainwright/precision"
DTYPES = "tests/test_law_dtypes.py"
SCALED_LOSS = (DTYPES, "-k", "bit_for_bit and float16")
DELAYED = (DTYPES, "-k", "bit_for_bit and delayed")
RESUMED = ("integration/tests/test_exact_resume.py", "-k", "scales_go_on")

FAULTS_OF_PRECISION = (
    Fault(
        "ranks scale their parts of a matrix by their own largest magnitude",
        f"{PRECISION}/float8/roles.py",
        "        comm.all_reduce(whole, ReduceOp.MAX).wait()",
        "        assert comm.size > 1",
        (DTYPES, "-k", "few_codes and current"),
    ),
    Fault(
        "delayed scales are those of one data rank",
        f"{PRECISION}/float8/state.py",
        "            communicator.all_reduce(met_T, ReduceOp.MAX).wait()",
        "            assert met_T.isfinite().all()",
        DELAYED,
    ),
    Fault(
        "the head multiplies FP8 operands too",
        f"{INTEGRATION}/numerics.py",
        'FLOAT8_LAYERS = ("model.layers.*",)',
        'FLOAT8_LAYERS = ("*",)',
        DELAYED,
    ),
    Fault(
        "losses are multiplied by twice what gradients are divided by",
        f"{INTEGRATION}/recipe.py",
        "divisor=batch.divisor, loss_scale=scale, timed=",
        "divisor=batch.divisor / 2, loss_scale=scale, timed=",
        SCALED_LOSS,
    ),
    Fault(
        "gradients stay scaled",
        f"{PRECISION}/gradients.py",
        "            torch._foreach_mul_(gradients, inverse)",
        "            torch._foreach_mul_(gradients, 1.0)",
        SCALED_LOSS,
    ),
    Fault(
        "clipping goes by the norm of scaled gradients",
        f"{INTEGRATION}/recipe.py",
        "clip_(gradients, parts.scaler.unscaled(totals.norm), parts.clip)",
        "clip_(gradients, totals.norm, parts.clip)",
        SCALED_LOSS,
    ),
    Fault(
        "gradients are added over data ranks in the dtype of the weights",
        "packages/sharding/src/trainwright/sharding/data/flat.py",
        "policy.wire_dtype_of(key.master_dtype)",
        "policy.wire_dtype_of(key.weight_dtype)",
        SCALED_LOSS,
    ),
    Fault(
        "a resumed run begins with another loss scale",
        f"{INTEGRATION}/training_state.py",
        '    parts.scaler.load_state_dict(tree["loss_scaler"])\n',
        "",
        RESUMED,
    ),
    Fault(
        "a resumed run has forgotten its delayed scales",
        f"{INTEGRATION}/training_state.py",
        '    parts.scales.restore(tree["float8"], run["step"])\n',
        "",
        RESUMED,
    ),
)
