"""Linear layers with float32, bf16 or int8 weights: native kernels, weight packing, merged projections."""
