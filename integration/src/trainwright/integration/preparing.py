"""What is done before any rank of a run starts: data read, folder made, other runs kept out."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import torch

from trainwright.collectives import Communicator
from trainwright.integration import worker
from trainwright.integration.config import RunConfig
from trainwright.integration.data import Reader
from trainwright.integration.data.reader import evenly_spaced
from trainwright.integration.run_folder import CONFIG, RunFolder
from trainwright.integration.settings.resolved import resolved

MAX_PATH = 4096


def prepare(config: RunConfig, out: str, resume: bool, other_data: bool = False) -> IO[str]:
    """Look at the data and make the run folder, before any rank starts.

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
    corpus = worker.load_corpus(config)
    Reader(corpus.train, config.batch.sequence_length, config.sizes.global_batch)
    evenly_spaced(corpus.held_out, config.batch.sequence_length, 1)
    with contextlib.ExitStack() as held:
        lock = held.enter_context(folder.lock())
        if resume:
            folder.check_data(corpus.checksum, corpus.source, allow_other=other_data)
            config.save(folder.path / CONFIG)
        else:
            folder.create(config, corpus.checksum)
        held.pop_all()
    numbers = "; ".join(resolved(config))
    skipped = f", {len(corpus.skipped)} binary files left out" if corpus.skipped else ""
    sys.stderr.write(
        f"{corpus.source}: {corpus.files} files, {len(corpus.train):,} bytes to train on, "
        f"{len(corpus.held_out):,} held out{skipped}\n{numbers}\nrun folder {out}\n"
    )
    return lock


def prepared_by_first(
    world: Communicator, begin: Callable[[], IO[str]], out: str, held: contextlib.ExitStack
) -> str:
    """Let the first rank make the run folder that all use; returns its name on every rank.

    Args:
        world: all ranks.
        begin: calls `prepare`.
        out: the folder as this rank would name it.
        held: what the lock is held by.

    Communicates: a broadcast of 4 KiB.
    """
    # Ranks that were started at different seconds would otherwise name different folders.
    text = torch.zeros(MAX_PATH, dtype=torch.uint8)
    if world.rank == 0:
        held.enter_context(begin())
        encoded = out.encode()
        text[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    on_device = text.to(world.device)
    world.broadcast(on_device, 0).wait()
    return bytes(on_device.cpu().tolist()).rstrip(b"\0").decode()
