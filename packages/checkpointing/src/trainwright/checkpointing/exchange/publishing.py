"""A new folder, written aside and given its name when all of it is safe."""

from __future__ import annotations

from pathlib import Path

import attrs

from trainwright.checkpointing.errors import TreeError
from trainwright.checkpointing.protocol import Files, Writer


@attrs.frozen
class Aside:
    """A folder that is being written under another name, beside where it will be.

    Args:
        files: The file system.
        folder: Its name to be; nothing may be there.
        token: Tells it from what an earlier attempt left behind.
    """

    files: Files
    folder: Path
    token: str

    @property
    def temporary(self) -> Path:
        """The folder while it is being written."""
        return self.folder.parent / f".writing-{self.folder.name}-{self.token}"

    def check(self) -> None:
        """Raise TreeError if there is something at the folder's place."""
        if self.folder.name in self.files.names(self.folder.parent):
            raise TreeError(f"{self.folder} is there already; give the name of a new folder")

    def make(self) -> None:
        """Make the temporary folder."""
        self.files.make_folder(self.folder.parent)
        self.files.make_folder(self.temporary)

    def create(self, name: str) -> Writer:
        """Open a new file in it for writing."""
        return self.files.create(self.temporary / name)

    def write(self, name: str, data: bytes) -> None:
        """Write a new file and sync it."""
        writer = self.create(name)
        try:
            writer.write(data)
            writer.sync()
        finally:
            writer.close()

    def publish(self) -> None:
        """Make all of it durable, and only then give it its name."""
        self.files.sync_folder(self.temporary)
        self.files.rename(self.temporary, self.folder)
        self.files.sync_folder(self.folder.parent)

    def discard(self) -> None:
        """Remove what was written."""
        self.files.remove_folder(self.temporary)
