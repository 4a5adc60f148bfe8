"""How to go on with a run that was ended from outside."""

from __future__ import annotations

import shlex
from pathlib import Path

from trainwright.checkpointing.state import StateStore
from trainwright.integration.errors import RunFolderError
from trainwright.integration.run_folder import RunFolder


def resume_command(out: str) -> str:
    """Return the command that goes on with the run in a folder."""
    return f"trainwright train --resume {shlex.quote(out)}"


def way_on(out: str) -> str:
    """Return a line with the command that goes on with a run, and from which step.

    Args:
        out: the run folder, which may hold no run yet.
    """
    folder = RunFolder(Path(out))
    try:
        store = StateStore(folder.checkpoints, run=folder.identity().run)
        saved = store.steps() if folder.checkpoints.exists() else []
    except (RunFolderError, OSError):
        return f"no run was begun in {out}"
    where = f"from step {saved[-1]}" if saved else "from the beginning, for nothing was saved"
    return f"go on {where} with: {resume_command(out)}"
