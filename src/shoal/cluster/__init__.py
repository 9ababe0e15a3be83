"""A cluster of engines behind one API: which engine runs which request, and the processes that run them.

``manager`` decides (pure functions of events), and ``packing`` has its policies that put running requests on
the fewest devices. ``router`` holds the clients' calls and streams, and executes decisions. ``backends``
start engine processes, on this machine (as children of a ``node`` process) or with Ray. Scheduling inside an
engine is ``schedule``; simulated engines are ``simulate``.
"""
