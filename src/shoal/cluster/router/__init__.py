"""The router: client calls, their streams and the connections to engines; carries out the manager's actions.

``router`` accepts calls, ``call_table`` routes tokens to streams, ``fleet`` starts and connects engines,
``action_runner`` passes events to the manager and executes what it decides, ``migration_runner`` does so for
migrations, ``administration`` adds, drains and removes engines and services.
"""
