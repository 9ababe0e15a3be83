"""Engines on the machines of a Ray cluster.

For each engine there is a detached actor, which *is* a node (see ``cluster.node``): it owns the engine's
process and lets one server at a time use it. Ray places actors and notices their end. ``actor`` runs there,
``remote_node`` and ``backend`` here; ``room`` says what an engine needs of a machine. Tokens go over the
engines' own sockets.
"""
