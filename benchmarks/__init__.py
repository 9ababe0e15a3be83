"""Benchmarks of the engine, scheduler, cluster, server and simulator: ``python -m benchmarks.NAME``.

docs/benchmarks.md has their figures. Run them from the root of the tree; those of several files are folders.
"""
