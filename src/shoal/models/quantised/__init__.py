"""Folders with quantised weights (AWQ, GPTQ, compressed-tensors, FP8): what their files say."""
