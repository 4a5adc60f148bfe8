"""Pipeline schedules as verified, simulated, drawn and executed data."""
