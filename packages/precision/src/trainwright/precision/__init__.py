"""Number formats, loss scaling and FP32 master weights for PyTorch training."""
