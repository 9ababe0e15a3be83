"""Placement: which services share which devices (SeaLLM), device maps of layers (UELLM), machine topology.

The command ``shoal place`` is in ``plan``, which searches with these functions and a simulator.
Pure functions of devices, services and traffic; the evaluator of placements is an argument. Simulated
evaluators are in ``simulate``.
"""
