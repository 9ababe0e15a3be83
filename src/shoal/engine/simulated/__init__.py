"""Engines with a simulated executor: real in all but the model, whose steps take time and compute nothing.

They import no torch, and load no weights.
"""
