"""Errors of the executor."""

from __future__ import annotations


class PipelineError(ValueError):
    """Stages, inputs or a schedule that the executor cannot run; the message says why."""


class BoundaryError(PipelineError):
    """What a stage hands on is not what may, or was declared to, cross the boundary."""
