"""What a process of `run_processes` does; a script, so that it imports only what it needs."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import pickle
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


def main() -> None:
    """Run the task of the folder named on the command line, as the rank named there."""
    folder = Path(sys.argv[1])
    rank = int(sys.argv[2])
    location, pickled, world_size, timeout_s = pickle.loads((folder / "task").read_bytes())
    # The last resort if the parent is gone; its own deadline comes first.
    faulthandler.dump_traceback_later(timeout_s + 5.0, exit=True)
    faulthandler.register(signal.SIGUSR1)
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
    written = folder / f"writing-{rank}"
    written.write_bytes(pickle.dumps(report))
    os.replace(written, folder / f"report-{rank}")
    sys.stdout.flush()
    if report[0]:
        # Connections of an abandoned group may keep threads that would wait for peers.
        os._exit(1)


def _run(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    communicator = TorchCommunicator()
    try:
        return fn(communicator, *args)
    except BaseException as error:
        communicator.abort(error)
        raise


def _find(location: Location) -> Callable[..., Any]:
    name, file, qualname = location
    try:
        if name == "__main__" and file is not None:
            raise ModuleNotFoundError(name)
        found: Any = importlib.import_module(name)
    except ModuleNotFoundError:
        if file is None:
            raise
        # Tests are often files that no import finds; a script must not run as one again.
        name = f"trainwright_child.{name}"
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        sys.modules[name] = found
        spec.loader.exec_module(found)
    for part in qualname.split("."):
        found = getattr(found, part)
    function: Callable[..., Any] = found
    return function


def _pickle(error: BaseException) -> bytes:
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        return b""
    return pickled


if __name__ == "__main__":
    main()
