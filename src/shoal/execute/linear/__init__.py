"""Products of matrices with float32, bf16 or int8 weights, and kernels of norms and activations."""
