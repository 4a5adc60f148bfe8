"""Faults of mixtures of experts: who counts, who is full, whose terms are added."""

from __future__ import annotations

from tools.mutants.faults import Fault
from tools.mutants.faults_of_context_and_experts import EXPERT

TESTS = "packages/sharding/tests"
LAYER = (f"{TESTS}/test_expert_layer.py", "-k", "on_any_mesh")
CASES = (f"{TESTS}/test_expert_cases.py", "-k")

FAULTS_OF_EXPERTS = (
    Fault(
        "terms of the parts of an expert are not added",
        f"{EXPERT}/exchange.py",
        "terms.view(etp.size, own, rows.shape[1]).sum(0)",
        "terms.view(etp.size, own, rows.shape[1])[etp.rank]",
        LAYER,
    ),
    Fault(
        "the last place of an expert stays empty",
        f"{EXPERT}/routing.py",
        "(share * (1 - _ROUNDING))).ceil()",
        "(share * (1 - _ROUNDING))).floor()",
        LAYER,
    ),
    Fault(
        "places of a micro-batch go by the position alone",
        f"{EXPERT}/tokens.py",
        "            place=sequence * _PLACES_OF_A_SEQUENCE + position,",
        "            place=position,",
        LAYER,
    ),
    Fault(
        "balance is that of the micro-batch whatever its scope",
        f"{EXPERT}/tokens.py",
        '        is_one = scope == "microbatch"',
        '        is_one = scope in ("microbatch", "sequence")',
        LAYER,
    ),
    Fault(
        "biases of experts move towards the load",
        f"{EXPERT}/balance.py",
        "(exact.mean() - exact).sign()",
        "(exact - exact.mean()).sign()",
        (*CASES, "bias_moves"),
    ),
    Fault(
        "choices of earlier steps move biases again",
        f"{EXPERT}/balance.py",
        "        layer.forget_counts()\n",
        "        pass\n",
        (*CASES, "bias_moves"),
    ),
    Fault(
        "padding adds to auxiliary losses",
        f"{EXPERT}/statistics.py",
        "    return values_N if tokens.valid is None else values_N.masked_fill(~tokens.valid, 0.0)",
        "    return values_N",
        LAYER,
    ),
    Fault(
        "of equal experts the last ones are chosen",
        f"{EXPERT}/routing.py",
        "values_NX.sort(dim=-1, descending=True, stable=True).indices",
        "values_NX.shape[-1] - 1 - values_NX.flip(-1).sort("
        "dim=-1, descending=True, stable=True).indices",
        (*CASES, "of_equal_experts"),
    ),
    Fault(
        "the best of a group of experts is its mean",
        f"{EXPERT}/routing.py",
        ".values[..., :best].sum(-1)",
        ".values.mean(-1)",
        (*CASES, "as_good_as_its_best"),
    ),
    Fault(
        "positions of a rank's tokens are those of an even cut",
        f"{EXPERT}/tokens.py",
        "            first = tp.rank * -(-whole // tp.size)",
        "            first = tp.rank * (whole // tp.size)",
        (f"{TESTS}/test_expert_places.py",),
    ),
)
