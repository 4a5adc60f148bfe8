"""Real processes for tests: each runs one function on a `TorchCommunicator` over Gloo."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from trainwright.collectives.errors import CollectiveTimeoutError, PeerFailedError

# How long the others may go on once one process has failed.
_GRACE_S = 5.0
_POLL_S = 0.01
# How long a process may take to print its stacks when asked to.
_STACKS_S = 0.5
# What would end the caller instead of telling it that a rank failed.
_ENDINGS = (SystemExit, KeyboardInterrupt, GeneratorExit)
_CHILD = Path(__file__).with_name("child.py")


class RemoteError(RuntimeError):
    """A process failed with an error that cannot be rebuilt here; the text holds what it said."""


def run_processes(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
) -> list[Any]:
    """Call ``fn(communicator, *args)`` in ``world_size`` new processes; return results by rank.

    The processes are forks of a new one that has imported what they need: nothing of the caller's
    is in them, and strings hash alike on all ranks. They have one intra-op thread each and a
    default process group over Gloo, so ``fn`` may use torch.distributed as well. The global random
    states of Python and numpy differ between them, torch's is alike. They end at the deadline, by
    themselves or by the caller's hand, on Linux also with the caller, and leave nothing behind.

    Args:
        fn: a function of a module; processes find it by the name of the module or by its file.
        world_size: number of processes.
        *args: passed on; they and the results are pickled.
        timeout_s: for all of it; starting takes three seconds.

    Raises:
        BaseException: what the first process to fail raised, with rank and traceback as notes.
        RemoteError: that cannot be rebuilt here or would end the caller (SystemExit,
            KeyboardInterrupt), or a process died without a word.
        TimeoutError: the processes did not finish in time.
    """
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="trainwright-", ignore_cleanup_errors=True) as folder:
        task = Path(folder) / "task"
        module = sys.modules[fn.__module__]
        location = (fn.__module__, getattr(module, "__file__", None), fn.__qualname__)
        task.write_bytes(pickle.dumps((location, pickle.dumps(args), world_size, timeout_s)))
        children = [_Child(rank, Path(folder)) for rank in range(world_size)]
        parent = _start(Path(folder))
        try:
            _await(children, parent, deadline)
            return [child.result() for child in children]
        finally:
            _end(parent)


def _start(folder: Path) -> subprocess.Popen[bytes]:
    """Start the process that becomes the ranks."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
    }
    with open(folder / "output", "wb") as output:
        return subprocess.Popen(
            [sys.executable, "-P", str(_CHILD), str(folder)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _end(parent: subprocess.Popen[bytes]) -> None:
    """End it together with the ranks."""
    if parent.poll() is None:
        parent.terminate()
        try:
            parent.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            parent.kill()
    parent.wait()


@attrs.define
class _Child:
    rank: int
    folder: Path

    @property
    def has_ended(self) -> bool:
        """Whether its process is gone."""
        return self._path("ended").exists()

    def result(self) -> Any:
        is_error, value, _ = self._report()
        assert not is_error
        return value

    def failure(self) -> tuple[float, BaseException] | None:
        """Return when and why it failed, or None."""
        if not self.has_ended:
            return None
        if not self._path("report").exists():
            text = f"rank {self.rank} ended with exit code {self._path('ended').read_text()}"
            return time.time(), RemoteError(f"{text}:\n{self.output()}")
        is_error, value, ended = self._report()
        if not is_error:
            return None
        pickled, text = value
        error: BaseException = RemoteError(f"on rank {self.rank}:\n{text}")
        with contextlib.suppress(Exception):
            rebuilt = pickle.loads(pickled)
            if not isinstance(rebuilt, _ENDINGS):
                error = rebuilt
                error.add_note(f"on rank {self.rank}, whose traceback was\n{text}")
        return ended, error

    def output(self) -> str:
        """Return the end of what it printed."""
        path = self._path("output")
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""

    def _path(self, what: str) -> Path:
        return self.folder / f"{what}-{self.rank}"

    def _report(self) -> tuple[bool, Any, float]:
        is_error, value, ended = pickle.loads(self._path("report").read_bytes())
        return is_error, value, ended


def _await(children: list[_Child], parent: subprocess.Popen[bytes], deadline: float) -> None:
    """Return when all have succeeded; raise what the first of them to fail raised."""
    while True:
        # A parent that has ended has written down how all of its ranks did.
        is_over = parent.poll() is not None
        running = [child for child in children if not child.has_ended]
        if any(child.failure() is not None for child in children):
            break
        if not running:
            return
        if is_over:
            output = (children[0].folder / "output").read_text(errors="replace")
            raise RemoteError(
                f"the process that starts the ranks ended with exit code {parent.returncode} "
                f"before ranks {[child.rank for child in running]} had finished:\n{output}"
            )
        if time.monotonic() > deadline:
            parent.send_signal(signal.SIGUSR1)
            time.sleep(_STACKS_S)
            said = "\n".join(f"--- rank {child.rank}\n{child.output()}" for child in children)
            raise TimeoutError(f"ranks {[child.rank for child in running]} did not finish\n{said}")
        time.sleep(_POLL_S)
    patience = min(deadline, time.monotonic() + _GRACE_S)
    while running and time.monotonic() < patience:
        time.sleep(_POLL_S)
        running = [child for child in running if not child.has_ended]
    failures = [child.failure() for child in children]
    raise _first([failure for failure in failures if failure is not None])


def _first(failures: list[tuple[float, BaseException]]) -> BaseException:
    # Peers learn of a failure from its cause, so theirs is never the one to look at.
    echoes = (PeerFailedError, CollectiveTimeoutError)
    causes = [failure for failure in failures if not isinstance(failure[1], echoes)]
    return min(causes or failures, key=lambda failure: failure[0])[1]
