"""Many engines as one: which engine has which request.

Here belongs what decides over engines, as pure functions of what they report, and what carries that out on
real ones. ``events`` and ``actions`` are what a manager is told and decides; ``backend`` is who runs the
engines' processes: ``local`` does on this machine, with ``node``, the process that owns them; ``packing``
puts running requests onto the fewest devices. Not here: what one engine does with its requests
(``schedule``), and the clock that drives simulated engines (``simulate``).
"""
