"""What is done before any rank of a run starts: data read, folder made, other runs kept out."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from trainwright.collectives import Communicator, broadcast_object
from trainwright.integration.aside import write_aside
from trainwright.integration.config import RunConfig
from trainwright.integration.data import Dataset, prepare_data
from trainwright.integration.data.finding import find_sources
from trainwright.integration.data.learned import FILE, LearnedTokenizer
from trainwright.integration.data.preparation import READING_S, left_there
from trainwright.integration.errors import TrainwrightError
from trainwright.integration.run_folder import CONFIG, DATA, RunFolder
from trainwright.integration.settings.resolved import resolved, saved_where
from trainwright.integration.vocabulary import shape_for


def prepare(config: RunConfig, out: str, resume: bool, other_data: bool = False) -> IO[str]:
    """Tokenise the data and make the run folder, before any rank starts.

    Args:
        config: the settings.
        out: the run folder.
        resume: whether it holds a run that is continued.
        other_data: whether that may go on with other data.

    Returns:
        What keeps other runs out of the folder while it is open.

    Raises:
        DataError: the data is missing, empty, binary or too short.
        RunFolderError: the folder already holds a run, another run is writing to it, or the run
            there was trained on other data.
    """
    folder = RunFolder(Path(out))
    if not resume:
        folder.check_free()
    before = folder.path.exists()
    find_sources(config.data.choice)

    def check(data: Dataset) -> None:
        if resume:
            folder.check_data(data.checksum, data.source, allow_other=other_data)

    with contextlib.ExitStack() as held:
        lock = held.enter_context(folder.lock())
        try:
            data = _prepared_data(config, folder, check)
            shape = shape_for(config, data.tokenizer.vocabulary)
            if resume:
                config.save(folder.path / CONFIG)
            else:
                folder.create(config, data.checksum)
        except TrainwrightError:
            if not before:
                # Nothing but what was made here is in it.
                shutil.rmtree(folder.path, ignore_errors=True)
            raise
        held.pop_all()
    told = [data.describe(), *resolved(config, shape), f"run folder {out}"]
    told.append(saved_where(config, folder.checkpoints))
    sys.stderr.writelines(f"{line}\n" for line in told)
    return lock


def _prepared_data(
    config: RunConfig, folder: RunFolder, check: Callable[[Dataset], None]
) -> Dataset:
    """Return the data in the folder; what is there of other data goes only if ``check`` passes."""
    kept, fresh = folder.path / DATA, folder.path / f"{DATA}.new"
    shutil.rmtree(fresh, ignore_errors=True)
    left = left_there(config.data.choice, kept)
    try:
        data = left or prepare_data(config.data.choice, fresh)
        data.samples(config.batch.sequence_length, config.seed)
        data.held_out_rows(config.batch.sequence_length, 1)
        check(data)
        if left is None:
            shutil.rmtree(kept, ignore_errors=True)
            fresh.rename(kept)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    if isinstance(data.tokenizer, LearnedTokenizer):
        write_aside(folder.path / FILE, data.tokenizer.content)
    return data


def prepared_by_first(
    world: Communicator,
    begin: Callable[[], tuple[IO[str], bool]],
    out: str,
    held: contextlib.ExitStack,
) -> tuple[str, bool]:
    """Let the first rank make the run folder that all use.

    Args:
        world: all ranks.
        begin: calls `prepare`, and says whether a run is continued.
        out: the folder as this rank would name it.
        held: what the lock is held by.

    Returns:
        The folder's name, and whether the run there is continued, the same on every rank.

    Communicates: what `broadcast_object` does; the others wait for up to `READING_S`.
    """
    # Ranks that were started at different seconds would otherwise name different folders.
    made = None
    if world.rank == 0:
        lock, continues = begin()
        held.enter_context(lock)
        made = (out, continues)
    found: tuple[str, bool] = broadcast_object(world, made, root=0, timeout_s=READING_S)
    return found
