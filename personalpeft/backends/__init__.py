"""The only part that touches tensors on a device and model code."""
