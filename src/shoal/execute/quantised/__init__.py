"""Quantised matrices of checkpoints as tensors: unpacked, dequantised, or in int8 as they are."""
