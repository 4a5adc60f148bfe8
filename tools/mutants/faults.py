"""Faults that peers really had, each as one change of our text, and the tests that must see it."""

from __future__ import annotations

import attrs

NORM = "packages/sharding/src/trainwright/sharding/norm"
TENSOR = "packages/sharding/src/trainwright/sharding/tensor"
COLLECTIVES = "packages/collectives/src/trainwright/collectives"
EXECUTE = "packages/pipeline-schedules/src/trainwright/pipeline_schedules/execute"
ACTIVATIONS = "packages/checkpointing/src/trainwright/checkpointing/activations"
INTEGRATION = "integration/src/trainwright/integration"

ONE_STEP = "test_one_step_in_a_layout and float64"
IN_3D = ("tests/test_law.py", "-k", f"{ONE_STEP} and dp2-tp2-pp2")
IN_PIPELINE = ("tests/test_law.py", "-k", f"{ONE_STEP} and pp5")
ALONE = ("tests/test_law.py", "-k", f"{ONE_STEP} and dp2-float64")
SERIAL_LOOP = ("integration/tests/test_ramping.py", "-k", "serial_loop")
IN_DATA = ("tests/test_law.py", "-k", f"{ONE_STEP} and dp3-pp2")


@attrs.frozen
class Fault:
    """One planted fault.

    Args:
        name: what goes wrong, in a sentence.
        file: the file, from the root.
        right: the text that stands there, exactly once.
        wrong: what it becomes.
        tests: arguments of pytest that select the tests which must go red.
    """

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...] = IN_3D


FAULTS_OF_THE_WHOLE = (
    Fault(
        "the loss is divided by the tokens of this rank instead of the global batch",
        f"{INTEGRATION}/feed.py",
        "        return batch, own, count, self._data.all_reduce(count)",
        "        return batch, own, count, self._data.all_reduce(count.clone())",
    ),
    Fault(
        "every data rank reads the first one's sequences",
        f"{INTEGRATION}/stepping.py",
        'data_rank=mesh.coordinate("dp"),',
        "data_rank=0,",
    ),
    Fault(
        "data ranks read by their place in the pipeline",
        f"{INTEGRATION}/stepping.py",
        'data_rank=mesh.coordinate("dp"),',
        'data_rank=mesh.coordinate("pp"),',
    ),
    Fault(
        "the sum after a row-parallel product is dropped",
        f"{TENSOR}/products.py",
        "    if tp.size == 1:\n        return terms\n",
        "    if tp.size >= 1:\n        return terms\n",
    ),
    Fault(
        "the input gradients of column-parallel products are not summed",
        f"{INTEGRATION}/model/parallel_layers.py",
        "        return replicate_to_partial(hidden_BSD, self.tp)",
        "        return hidden_BSD",
    ),
    Fault(
        "the input gradients of column-parallel products are summed twice",
        f"{INTEGRATION}/model/parallel_layers.py",
        "        return replicate_to_partial(hidden_BSD, self.tp)",
        "        return replicate_to_partial(replicate_to_partial(hidden_BSD, self.tp), self.tp)",
    ),
    Fault(
        "replicated weights count once a rank in the norm",
        f"{NORM}/totals.py",
        "        if all(mesh.coordinate(axis) == 0 for axis in piece.spec.replicated):",
        "        if True:",
    ),
    Fault(
        "the norm is that of one pipeline stage",
        f"{NORM}/totals.py",
        "    works = [mesh.world.all_reduce(totals)]",
        '    works = [mesh.communicator("dp", "tp").all_reduce(totals)]',
    ),
    Fault(
        "the loss of each microbatch is divided by their number once more",
        f"{EXECUTE}/losses.py",
        "scale / divisor, 0.0)",
        "scale / divisor / 2, 0.0)",
    ),
    Fault(
        "the last microbatch's gradient is not added before the reduction",
        f"{EXECUTE}/run.py",
        "        passed_on = run_backward(flight, gradients)\n",
        "        passed_on = run_backward(flight, gradients)\n"
        "        if microbatch == 3:\n"
        "            for parameter in self._parts.stages[stage].parameters():\n"
        "                parameter.grad.zero_()\n",
        IN_DATA,
    ),
    Fault(
        "gradients of two microbatches change places at a stage boundary",
        f"{EXECUTE}/run.py",
        "        self._gradients[slot] = self._transfers.await_gradient(slot)",
        "        gradients = self._transfers.await_gradient(slot)\n"
        "        self._gradients[slot] = [gradient.flip(0) for gradient in gradients]",
        IN_PIPELINE,
    ),
    Fault(
        "initial weights depend on the pipeline rank",
        f"{INTEGRATION}/sharded.py",
        "initialize=initializer(placements, shape, config.seed) if drawn",
        'initialize=initializer(placements, shape, config.seed + mesh.coordinate("pp")) if drawn',
        SERIAL_LOOP,
    ),
    Fault(
        "tensor ranks hold each other's rows",
        f"{TENSOR}/linear.py",
        "ParameterPlacement.cut(shape, 0, self.cut, rank=rank)}",
        "ParameterPlacement.cut(shape, 0, self.cut, rank=self.tp.size - 1 - rank)}",
    ),
    Fault(
        "later stages stretch the positions",
        f"{INTEGRATION}/feed.py",
        '            "positions_S": self.positions_S,',
        '            "positions_S": self.positions_S * (1 + int(stage > 0)),',
        IN_PIPELINE,
    ),
    Fault(
        "the cross-entropy forgets the maxima of the other tensor ranks",
        f"{TENSOR}/loss_terms.py",
        "(sums_RT * below_RT.exp()).sum(0)",
        "sums_RT.sum(0)",
    ),
    Fault(
        "the embedding is summed by data ranks instead of tensor ranks",
        f"{TENSOR}/embedding.py",
        "        return differentiable.partial_to_replicate(found, self.tp)",
        "        return found",
    ),
    Fault(
        "clipping uses twice the norm",
        f"{INTEGRATION}/recipe.py",
        "totals.norm), parts.clip)",
        "totals.norm * 2), parts.clip)",
    ),
    Fault(
        "weight decay pulls at flat pieces of norms",
        f"{INTEGRATION}/optimizers/joined.py",
        "roles={name: name in decaying for name in pieces},",
        "roles={name: True for name in pieces},",
    ),
    Fault(
        "the learning rate moves on twice a step",
        f"{INTEGRATION}/recipe.py",
        "    progress.updates += 1",
        "    progress.updates += 2",
        SERIAL_LOOP,
    ),
    Fault(
        "a resumed reader starts over",
        f"{INTEGRATION}/data/reader.py",
        '        self.consumed = int(state["consumed"])',
        "        self.consumed = 0",
    ),
)
