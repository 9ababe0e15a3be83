"""Profiling: step times of a real engine over a grid of shapes, fits of latency models, speed of migrations.

Here belongs measuring; what latency models are is ``forecast``'s. An engine never imports this.
"""
