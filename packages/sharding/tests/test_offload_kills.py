"""A process that is killed leaves nothing of its offloaded states."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.fault]

TRAINING = textwrap.dedent(
    """
    import sys
    import torch
    from trainwright.collectives import SingleCommunicator
    from trainwright.sharding import Mesh, MeshShape
    from trainwright.sharding.data import (
        ShardPolicy, data_parallel, offloaded_step, parameter_groups,
    )
    from trainwright.sharding.offload import offload_to_folder

    offload = offload_to_folder(sys.argv[1], file_bytes_s=3e6)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    mesh = Mesh(SingleCommunicator(), MeshShape())
    parallel = data_parallel(model, mesh, ShardPolicy(stage=2), offload=offload)
    optimizer = torch.optim.AdamW(parameter_groups(parallel, list(model.parameters())))
    stepping = offloaded_step(optimizer, [parallel], offload)
    while True:
        parallel.zero_grad()
        model(torch.ones(2, 256)).sum().backward()
        parallel.reduce()
        parallel.wait()
        print("updating", flush=True)
        stepping.step()
        parallel.publish()
    """
)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda n: n.name)
def test_a_run_that_is_killed_in_an_update_leaves_its_folder_empty(
    number: signal.Signals, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "updating\n"
        process.send_signal(number)
        assert process.wait(timeout=60.0) == -number
    finally:
        process.kill()
        process.communicate(timeout=60.0)

    assert list(tmp_path.iterdir()) == []
