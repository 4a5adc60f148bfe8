"""Column products of which some are frozen share one gathered sequence."""

import pytest
import torch

from trainwright.collectives import LocalWorld
from trainwright.sharding.data.testing import RecordingCommunicator
from trainwright.sharding.tensor import ColumnParallelLinear, SequenceSharding, enter_sequence


@pytest.mark.parametrize(
    ("frozen", "again"),
    [(0, ["all_gather"]), (1, ["all_gather"]), (2, ["all_gather"]), (3, [])],
)
def test_each_backward_gathers_once_for_the_columns_that_are_trained(frozen, again):
    def run(tp):
        calls = []
        recording = RecordingCommunicator(tp, calls)
        sequence = SequenceSharding.keeping_shards(0)
        layers = [
            ColumnParallelLinear(4, 4, recording, sequence=sequence, input_is_entered=True)
            for _ in range(3)
        ]
        for layer in layers[:frozen]:
            layer.requires_grad_(False)
        own = torch.full((2, 4), tp.rank + 1.0, requires_grad=True)
        hidden = enter_sequence(own, recording, sequence)
        total = torch.stack([layer(hidden) for layer in layers]).sum()
        names = []
        # Twice through one graph: what one backward gathered is not kept for the next.
        for _ in range(2):
            calls.clear()
            total.backward(retain_graph=True)
            names.append([call.operation for call in calls])
        return names, [layer.weight.grad for layer in layers]

    # Two positions of ones and two of twos, in two backwards.
    expected = torch.full((2, 4), 12.0)
    for names, gradients in LocalWorld(2).run(run):
        assert names == [[*again, "reduce_scatter"]] * 2
        assert gradients[:frozen] == [None] * frozen
        assert all(torch.equal(found, expected) for found in gradients[frozen:])
