"""Faults of FP8 products in cut layers, and of weights that travel as codes."""

from __future__ import annotations

from tools.mutants.faults import TENSOR, Fault

FLOAT8 = "packages/precision/src/trainwright/precision/float8"
DATA = "packages/sharding/src/trainwright/sharding/data"

LAYERS = ("tests/test_float8_layers.py",)
WEIGHTS = ("tests/test_float8_weights.py",)

FAULTS_OF_FLOAT8 = (
    Fault(
        "the output of a cut layer is multiplied without quantising",
        f"{FLOAT8}/bound.py",
        "        out = products.scaled_product(first, second, dtype or input.dtype)\n",
        "        out = matrix_MI @ weight.t()\n",
        LAYERS,
    ),
    Fault(
        "the input gradient of a cut layer is multiplied without quantising",
        f"{FLOAT8}/bound.py",
        "        out = products.scaled_product(first, second, dtype or gradient.dtype)\n",
        "        out = as_matrix(gradient) @ weight\n",
        LAYERS,
    ),
    Fault(
        "the weight gradient of a cut layer is multiplied without quantising",
        f"{FLOAT8}/bound.py",
        "        return products.scaled_product(first, second, dtype or gradient.dtype)\n",
        "        return as_matrix(gradient).t() @ as_matrix(input)\n",
        LAYERS,
    ),
    Fault(
        "another backward through a forward has the scale of the first one's gradient",
        f"{FLOAT8}/bound.py",
        "measured is None or measured[0]() is not gradient",
        "measured is None",
        ("packages/precision/tests/test_float8_scopes.py",),
    ),
    Fault(
        "terms of the gradient of shared keys are rounded one by one",
        f"{TENSOR}/key_value.py",
        "            output = sum_shared_rows(output, self.tp, self.cut)\n",
        "            pass\n",
        LAYERS,
    ),
    Fault(
        "the gradient of shared keys counts on every rank that has them",
        f"{TENSOR}/shared_rows.py",
        "row not in earlier for row",
        "True for row",
        ("packages/sharding/tests/tensor/test_given_products.py",),
    ),
    Fault(
        "weights travel as codes of each rank's own scale",
        f"{DATA}/coded.py",
        "            comm.all_reduce(packed, ReduceOp.MAX).wait()\n",
        "            pass\n",
        WEIGHTS,
    ),
    Fault(
        "loading takes decoded weights for masters",
        f"{DATA}/weights.py",
        "            changed = self.coded.changed(own)\n",
        "            changed = torch.ones_like(own, dtype=torch.bool)\n",
        WEIGHTS,
    ),
)
