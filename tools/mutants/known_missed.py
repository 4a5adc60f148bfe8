"""Faults that no test sees, each with the reason."""

from __future__ import annotations

KNOWN_MISSED: dict[str, str] = {}
"""By the fault's name."""
