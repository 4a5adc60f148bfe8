"""Communicators, collective algorithms and what ranks must agree on, for PyTorch."""
