"""Searches by simulation: which scheduler, and which devices, suit a workload.

Here belong what is searched and how: candidates, successive halving, confidence, catalogues of devices. The
pure parts (``halving``, ``confidence``) know nothing of simulations; what is simulated is a scenario of
``config``. Every search looks at the earlier part of the workload, and reports on the later, which it has not
seen.
"""
