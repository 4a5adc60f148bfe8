"""However a process ends, the caller is told so, and no rank lives on."""

import os
import pickle
import signal
import sys
import time
from pathlib import Path

import pytest

from trainwright.collectives import TorchCommunicator
from trainwright.collectives.testing import RemoteError, run_processes
from trainwright.collectives.testing.processes import _Child


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills children with their parent")
def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    start = time.monotonic()

    with pytest.raises(RemoteError, match=r"exit code -9 before ranks \[0, 1\] had finished"):
        run_processes(kill_parent, 2, tmp_path, timeout_s=50.0)

    while any(is_running(int(path.name)) for path in tmp_path.iterdir()):
        assert time.monotonic() - start < 40.0
        time.sleep(0.01)
    assert len(list(tmp_path.iterdir())) == 2


def kill_parent(comm: TorchCommunicator, folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    comm.barrier()
    if comm.rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(100.0)


def is_running(pid: int) -> bool:
    """Whether it lives; where nobody waits for orphans, their names stay."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.parametrize("ending", [SystemExit(0), KeyboardInterrupt()], ids=repr)
def test_what_would_end_the_caller_is_a_failure(ending: BaseException, tmp_path: Path) -> None:
    report = (True, (pickle.dumps(ending), f"its traceback, {ending!r}"), 0.0)
    (tmp_path / "report-3").write_bytes(pickle.dumps(report))
    (tmp_path / "ended-3").write_text("1")

    failure = _Child(3, tmp_path).failure()

    assert failure is not None
    assert isinstance(failure[1], RemoteError)
    assert str(failure[1]) == f"on rank 3:\nits traceback, {ending!r}"
