"""The command line: show a schedule, compare all generators, search for a schedule."""

from trainwright.pipeline_schedules.command.entry import main

__all__ = ["main"]
