"""Errors that a person at the command line meets."""


class TrainwrightError(Exception):
    """Something trainwright cannot do as asked; the message says what to change."""


class ConfigError(TrainwrightError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class DataError(TrainwrightError, ValueError):
    """Training data that is missing, empty, binary or too short."""


class RunFolderError(TrainwrightError):
    """A run folder that already holds a run, or does not hold the one asked for."""
