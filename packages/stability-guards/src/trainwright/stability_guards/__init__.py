"""Clipping, learning-rate schedules and guards that all ranks agree on."""
