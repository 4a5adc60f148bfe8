"""Faults of sharded data parallelism, stage by stage."""

from __future__ import annotations

from tools.mutants.faults import ALONE, EXECUTE, IN_3D, IN_DATA, ONE_STEP, Fault

DATA = "packages/sharding/src/trainwright/sharding/data"

CUT_GRADIENTS = ("tests/test_law.py", "-k", f"{ONE_STEP} and dp2-pp3")
HYBRID = ("tests/test_law.py", "-k", f"{ONE_STEP} and dp_shard2")
BY_HOOKS = ("tests/test_law.py", "-k", f"{ONE_STEP} and dp2-pp2")

FAULTS_OF_DATA_PARALLELISM = (
    Fault(
        "the data-parallel reduction of stage 0 is dropped",
        f"{DATA}/gradients.py",
        "            self._work = self.data.all_reduce(wire)",
        "            self._work = None",
        IN_DATA,
    ),
    Fault(
        "the data-parallel reduction of stages 1 to 3 is dropped",
        f"{DATA}/gradients.py",
        "        self._work = self.data.reduce_scatter(arriving, wire)",
        "        self._work = None",
        CUT_GRADIENTS,
    ),
    Fault(
        "the data-parallel sum counts twice",
        f"{DATA}/gradients.py",
        "        work.wait()\n        if self.travel is not None:",
        "        work.wait()\n        arriving.mul_(2)\n        if self.travel is not None:",
        IN_3D,
    ),
    Fault(
        "gradients are averaged over data ranks on top of the token division",
        f"{DATA}/gradients.py",
        "        for communicator in self.partial:\n",
        "        self.kept.div_(self.data.size)\n        for communicator in self.partial:\n",
        IN_DATA,
    ),
    Fault(
        "of the sums of micro-batches only the last is kept",
        f"{DATA}/gradients.py",
        "            self.kept.add_(arriving)",
        "            self.kept.copy_(arriving)",
        HYBRID,
    ),
    Fault(
        "sums are not added over the copies of a hybrid layout",
        f"{DATA}/axes.py",
        '            axes.insert(0, "dp_replicate")',
        "            pass",
        HYBRID,
    ),
    Fault(
        "the two gradients of a tied embedding are not added",
        f"{DATA}/axes.py",
        "        axes = [axis for axis in key.partial_axes if self._mesh.size(axis) > 1]",
        '        axes = [axis for axis in key.partial_axes if axis != "pp"]',
        CUT_GRADIENTS,
    ),
    Fault(
        "a rank keeps its neighbour's range",
        f"{DATA}/gradients.py",
        "            start = self.data.rank * self.kept.numel()",
        "            start = (self.data.size - 1 - self.data.rank) * self.kept.numel()",
        HYBRID,
    ),
    Fault(
        "updated weights of other data ranks are not gathered",
        f"{DATA}/weights.py",
        "            self._work = self.comm.all_gather(self.full, self.kept)",
        "            pass",
        ALONE,
    ),
    Fault(
        "weights are read before they have been gathered",
        f"{EXECUTE}/program.py",
        "            self._started.add(keeper)",
        "            pass",
        HYBRID,
    ),
    Fault(
        "gathered weights are released while their backward still runs",
        f"{DATA}/hooks.py",
        "        for other in [c for c in self._active if c.task == task and c.start > number]:",
        "        for other in [c for c in self._active if c.task == task]:",
        BY_HOOKS,
    ),
)
