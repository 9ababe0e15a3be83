"""The Ray backend: engines on the machines of a Ray cluster.

Each engine has a detached actor, which is a node (see ``cluster.node``): it owns the engine's process and
lets one server at a time use it. Ray places actors and notices their end. ``actor`` runs there;
``remote_node`` and ``backend`` run here; ``resources`` says what an engine needs of a machine. Tokens use the
engines' own sockets.
"""
