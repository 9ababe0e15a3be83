"""Searches by simulation: ``shoal tune`` (scheduler), ``shoal place`` (placement), ``shoal plan`` (devices).

This package has search spaces, successive halving, confidence intervals and device catalogues. The pure parts
(``halving``, ``confidence``) are independent of simulation; what is simulated is a scenario of ``config``.
Every search uses the earlier part of the workload, and reports on the later, held-out part.
"""
