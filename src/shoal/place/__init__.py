"""Placement: which services share which devices (SeaLLM), device maps of layers (UELLM), machine topology.

Pure functions of devices, services and traffic; the evaluator of placements is an argument. Simulated
evaluators are in ``simulate``.
"""
