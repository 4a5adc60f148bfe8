"""Meshes, placements, data and tensor parallelism for PyTorch modules."""
