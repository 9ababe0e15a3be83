"""Placement: which services share which devices (SeaLLM, section 4.1), and which layers are where (UELLM).

Here belong placements, what is expected of them, searches for a good one, and device maps: pure functions of
devices, services and traffic, with an evaluator as an argument. Simulating a placement is not here (that is
``simulate``), nor is carrying one out.
"""
