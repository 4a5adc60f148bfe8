"""Errors that a person at the command line meets."""

LONGEST = 4_000
"""Letters that a message has at most: what is wrong may be a line of megabytes."""


class TrainwrightError(Exception):
    """Something trainwright cannot do as asked; the message says what to change.

    Values in it come from files that others have written. The message shows them so that they can
    be printed: halves of characters by their numbers, and what is very long without its middle.
    """

    def __str__(self) -> str:
        text = super().__str__().encode(errors="backslashreplace").decode()
        half = LONGEST // 2
        return text if len(text) <= LONGEST else f"{text[:half]} … {text[-half:]}"


class ConfigError(TrainwrightError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class DataError(TrainwrightError, ValueError):
    """Training data that is missing, empty, binary or too short."""


class RunFolderError(TrainwrightError):
    """A run folder that already holds a run, or does not hold the one asked for."""
