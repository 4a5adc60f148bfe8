"""Configurations of DeepSpeed: every key is used, ignored with a reason, or refused."""

from trainwright.integration.deepspeed.ignored import IGNORED
from trainwright.integration.deepspeed.reading import Reading, read_deepspeed
from trainwright.integration.deepspeed.tolerant import parse_tolerantly

__all__ = [
    "IGNORED",
    "Reading",
    "parse_tolerantly",
    "read_deepspeed",
]
