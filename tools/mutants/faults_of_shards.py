"""Faults of what a rank keeps: ranges, sums, masters, the one norm."""

from __future__ import annotations

from tools.mutants.faults import NORM, Fault
from tools.mutants.faults_of_data_parallelism import DATA

TESTS = "packages/sharding/tests"


def _in(file: str, words: str) -> tuple[str, ...]:
    return (f"{TESTS}/{file}.py", "-k", words)


FAULTS_OF_KEPT_RANGES = (
    Fault(
        "updated masters never reach the weights",
        f"{DATA}/weights.py",
        "            self.kept.copy_(self.masters)\n",
        "            pass\n",
        _in("test_data_gradients", "small_updates_of_bfloat16"),
    ),
    Fault(
        "masters stay what they were when weights are loaded",
        f"{DATA}/weights.py",
        "            self.masters.copy_(self.kept)\n",
        "            pass\n",
        _in("test_data_gradients", "reach_the_masters"),
    ),
    Fault(
        "loading gives every rank the first one's range",
        f"{DATA}/weights.py",
        "        if self.is_cut:\n            start = self.comm.rank * self.kept.numel()\n",
        "        if self.is_cut:\n            start = 0 * self.kept.numel()\n",
        _in("data/test_loaded_ranges", "element_by_element"),
    ),
    Fault(
        "a piece says that it is the beginning of its parameter",
        f"{DATA}/flat.py",
        "    spec = whole.narrow(first + at - start, last + at - start)",
        "    spec = whole.narrow(0, last - first)",
        _in("test_data_equals_serial", "every_stage"),
    ),
    Fault(
        "of a parameter that two ranks keep the second has one element fewer",
        f"{DATA}/flat.py",
        "    first = max(start - at, 0)\n",
        "    first = max(start - at, 0) + int(start < at)\n",
        _in("test_data_equals_serial", "every_stage"),
    ),
    Fault(
        "parameters of a bucket overlap by the last one's alignment",
        f"{DATA}/layout.py",
        "            at += _round_up(entry.numel, alignment)",
        "            at += _round_up(max(1, entry.numel - alignment), alignment)",
        _in("test_data_layout", "share_no_element"),
    ),
    Fault(
        "released weights are those of before, and not gathered again",
        f"{DATA}/weights.py",
        "            self.full.untyped_storage().resize_(0)\n            self.is_whole = False\n",
        "            pass\n",
        _in("data/test_stage_three", "next_gather_sees or released_weights"),
    ),
    Fault(
        "weights are read while they are still on their way",
        f"{DATA}/weights.py",
        "            work.wait()\n            if self.coded",
        "            if self.coded",
        _in("data/test_stage_three", "released_weights"),
    ),
)

FAULTS_OF_SUMS = (
    Fault(
        "a bucket that got nothing keeps the sums of the step before",
        f"{DATA}/gradients.py",
        "            self.kept.zero_()\n",
        "            pass\n",
        _in("data/test_rounds", "earlier_step or numbers_of_backwards"),
    ),
    Fault(
        "sums of the step before are added to",
        f"{DATA}/gradients.py",
        "        self._arrive()\n        self._has_sums = False\n",
        "        self._arrive()\n",
        _in("test_data_equals_serial", "every_stage"),
    ),
)

FAULTS_OF_THE_NORM = (
    Fault(
        "a weight that both ends of the pipeline hold counts on both",
        f"{DATA}/axes.py",
        "            if axis not in key.data_axes:\n                replicated",
        '            if axis not in (*key.data_axes, "pp"):\n                replicated',
        _in("data/test_hybrid_and_tied_ends", "one_sum_one_norm"),
    ),
    Fault(
        "rows of a norm are added up as they are",
        f"{NORM}/sums.py",
        "joined.pow(p).sum()",
        "joined.sum().pow(p)",
        _in("test_norm", "agree_with_float64"),
    ),
    Fault(
        "the last elements of a tensor are left out of its norm",
        f"{NORM}/sums.py",
        "        if whole < flat.numel():",
        "        if not whole and whole < flat.numel():",
        _in("test_norm", "agree_with_float64"),
    ),
    Fault(
        "elements that are not finite are counted on no rank",
        f"{NORM}/totals.py",
        "    totals[1] = count_non_finite(gradients, norms, device)",
        "    totals[1] = 0.0",
        _in("test_norm", "carries_everything"),
    ),
    Fault(
        "tokens count once for each tensor rank",
        f"{NORM}/totals.py",
        "    totals[3] = tokens if counts_here else 0.0",
        "    totals[3] = tokens",
        _in("test_norm", "carries_everything"),
    ),
    Fault(
        "a rank's verdict counts as one to go on",
        f"{NORM}/totals.py",
        "    totals[4 + verdict] = 1.0",
        "    totals[4] = 1.0",
        _in("test_norm", "carries_everything"),
    ),
    Fault(
        "the largest magnitude is that of this rank",
        f"{NORM}/totals.py",
        "        works.append(mesh.world.all_reduce(magnitude, ReduceOp.MAX))",
        "        works.append(mesh.world.all_reduce(magnitude.clone(), ReduceOp.MAX))",
        _in("test_norm", "order_asked_for or any_layout"),
    ),
)

FAULTS_OF_SHARDS = (*FAULTS_OF_KEPT_RANGES, *FAULTS_OF_SUMS, *FAULTS_OF_THE_NORM)
