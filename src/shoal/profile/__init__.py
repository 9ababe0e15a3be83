"""Profiling: step times of a real engine over a grid of shapes, fits of latency models, rates of migrations.

The latency models themselves are in ``forecast``. An engine never imports this package.
"""
