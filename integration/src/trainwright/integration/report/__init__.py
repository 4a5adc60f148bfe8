"""A run as one page for the browser: curves, interventions, ranks, memory, pipeline, settings."""

from trainwright.integration.report.page import page
from trainwright.integration.report.reading import RunFacts, read_run

__all__ = ["RunFacts", "page", "read_run"]
