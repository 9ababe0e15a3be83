"""Many engines as one: which engine has which request.

Here belongs what decides over engines, as pure functions of what they report: ``packing`` puts running
requests onto the fewest devices. Not here: what one engine does with its requests (``schedule``), and the
clock that drives simulated engines (``simulate``).
"""
