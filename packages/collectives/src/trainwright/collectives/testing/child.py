"""What the processes of `run_processes` do; a script, so that it imports only what it needs.

The first process imports what all need and becomes the ranks by forking, since importing costs more
than most tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainwright.collectives.torch_communicator import TorchCommunicator

Location = tuple[str, str | None, str]
# Where the function is, its pickled arguments, number of ranks, seconds for all of it.
Task = tuple[Location, bytes, int, float]
_PR_SET_PDEATHSIG = 1  # in <sys/prctl.h>


def main() -> None:
    """Start the ranks of the folder named on the command line, and write down how they end."""
    _die_with_parent()
    folder = Path(sys.argv[1])
    task: Task = pickle.loads((folder / "task").read_bytes())
    # What cannot be imported is told by the ranks.
    with contextlib.suppress(Exception):
        _find(task[0])
    ranks: dict[int, int] = {}

    def pass_on(number: int, frame: object) -> None:
        for pid in list(ranks):
            os.kill(pid, signal.SIGKILL if number == signal.SIGTERM else number)
        if number == signal.SIGTERM:
            os._exit(1)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGUSR1, pass_on)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    own_pid = os.getpid()
    for rank in range(task[2]):
        pid = os.fork()
        if pid == 0:
            _die_with_parent()
            if os.getppid() != own_pid:  # it was gone before
                os._exit(1)
            return _live(folder, rank, *task)
        ranks[pid] = rank
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    while ranks:
        # It is forgotten before it is waited for: afterwards another process may have its number.
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        rank = ranks.pop(ended.si_pid)
        status = os.waitpid(ended.si_pid, 0)[1]
        _write(folder, f"ended-{rank}", str(os.waitstatus_to_exitcode(status)).encode())


def _die_with_parent() -> None:
    """Let the kernel, where it can, kill this process once its parent is gone, however it went."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _seed_anew() -> None:
    """Let global generators differ between ranks, as between processes that share no past."""
    random.seed()
    of_numpy = sys.modules.get("numpy.random")
    if of_numpy is not None:
        of_numpy.seed()


def _live(
    folder: Path, rank: int, location: Location, pickled: bytes, world_size: int, timeout_s: float
) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    with open(folder / f"output-{rank}", "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    # The last resort if the parent is gone; its own deadline comes first.
    faulthandler.dump_traceback_later(timeout_s + 5.0, exit=True)
    faulthandler.register(signal.SIGUSR1)
    _seed_anew()
    torch.set_num_threads(1)
    report: tuple[bool, Any, float]
    try:
        fn = _find(location)
        store = dist.FileStore(  # type: ignore[attr-defined]
            str(folder / "store"), world_size
        )
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        result = _run(fn, pickle.loads(pickled))
        report = (False, result, time.time())
        dist.destroy_process_group()
    except BaseException as error:
        report = (True, (_pickle(error), traceback.format_exc()), time.time())
    _write(folder, f"report-{rank}", pickle.dumps(report))
    sys.stdout.flush()
    if report[0]:
        # Connections of an abandoned group may keep threads that would wait for peers.
        os._exit(1)


def _write(folder: Path, name: str, data: bytes) -> None:
    """Write a file that is there at once as a whole."""
    written = folder / f"writing-{name}"
    written.write_bytes(data)
    os.replace(written, folder / name)


def _run(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    communicator = TorchCommunicator()
    try:
        return fn(communicator, *args)
    except BaseException as error:
        communicator.abort(error)
        raise


def _find(location: Location) -> Callable[..., Any]:
    name, file, qualname = location
    loaded = f"trainwright_child.{name}"
    try:
        if name == "__main__" and file is not None:
            raise ModuleNotFoundError(name)
        found: Any = importlib.import_module(name)
    except ModuleNotFoundError:
        if file is None:
            raise
        # Tests are often files that no import finds; a script must not run as one again.
        found = sys.modules.get(loaded) or _load(loaded, file)
    for part in qualname.split("."):
        found = getattr(found, part)
    function: Callable[..., Any] = found
    return function


def _load(name: str, file: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _pickle(error: BaseException) -> bytes:
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        return b""
    return pickled


if __name__ == "__main__":
    main()
