"""Run a command under a deadline and leave no process of its behind.

``python -m tools.deadline SECONDS COMMAND…`` exits with the command's code, or with 124 after the
deadline, when the whole session of processes that the command started is killed by its own id.
It prints what the command took: seconds, seconds of processors, memory of its largest process.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time

GRACE_S = 15.0
"""What a launcher gets to end its workers, before it is killed."""


def main(seconds: float, command: list[str]) -> int:
    """Run ``command``; return its exit code, or 124 when it took longer than ``seconds``."""
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
        _report(time.perf_counter() - began)


def _report(seconds: float) -> None:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"wall {seconds:.1f} s, processors {used.ru_utime + used.ru_stime:.1f} s, "
        f"largest process {used.ru_maxrss / 1024:.0f} MiB",
        flush=True,
    )


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
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
