"""Run a command under a deadline and leave no process of its behind.

``python -m tools.deadline [--figures FILE] SECONDS COMMAND…`` exits with the command's code, or
with 124 after the deadline, when the whole session of processes that the command started is killed
by its own id.
It prints what the command took: seconds, seconds of processors, memory of its largest process.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_S = 15.0
"""What a launcher gets to end its workers, before it is killed."""


def main(seconds: float, command: list[str], figures: Path | None = None) -> int:
    """Run ``command``; return its exit code, or 124 when it took longer than ``seconds``.

    Args:
        seconds: until the deadline.
        command: what to run.
        figures: where to write what it took, as JSON; None: it is printed only.
    """
    # Whoever ends this ends all of it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.perf_counter()
    child = subprocess.Popen(command, start_new_session=True)
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"deadline of {seconds:.0f} s passed: {' '.join(command)}", file=sys.stderr)
        return 124
    except KeyboardInterrupt:
        return 130
    finally:
        _end(child)
        _report(time.perf_counter() - began, figures)


def _report(seconds: float, figures: Path | None) -> None:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = {
        "seconds": seconds,
        "processor_seconds": used.ru_utime + used.ru_stime,
        "mebibytes": used.ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10),
    }
    print(
        "wall {seconds:.1f} s, processors {processor_seconds:.1f} s, "
        "largest process {mebibytes:.0f} MiB".format(**found),
        flush=True,
    )
    if figures is not None:
        figures.write_text(json.dumps(found))


def _end(child: subprocess.Popen[bytes]) -> None:
    # The child leads a session of its own, so its number names the group of all it started.
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, sign)
        except ProcessLookupError:
            return
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue


if __name__ == "__main__":
    given = sys.argv[1:]
    path = Path(given[1]) if given[0] == "--figures" else None
    given = given if path is None else given[2:]
    sys.exit(main(float(given[0]), given[1:], path))
