"""Run a command under a deadline and leave no process of its behind.

``python -m tools.deadline SECONDS COMMAND…`` exits with the command's code, or with 124 after the
deadline, when the whole session of processes that the command started is killed by its own id.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

GRACE_S = 15.0
"""What a launcher gets to end its workers, before it is killed."""


def main(seconds: float, command: list[str]) -> int:
    """Run ``command``; return its exit code, or 124 when it took longer than ``seconds``."""
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
