"""Activation recomputation and durable, resharding training state for PyTorch."""
