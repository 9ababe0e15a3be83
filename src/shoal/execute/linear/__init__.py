"""Linear layers: products of weights in float32, bf16 or int8, as this CPU computes them fastest."""
