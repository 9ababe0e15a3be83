"""Models: loading weights, choosing dtypes, probing attention, fusing layers, running forward passes."""
