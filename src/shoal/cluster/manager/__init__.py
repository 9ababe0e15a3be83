"""The cluster manager: which engine runs what, as pure functions of events (no clock, no I/O, replayable).

``manager`` maps ``events`` to ``actions``. Its parts: ``dispatch`` (policies that choose an engine),
``assignment`` (which engine has which request), ``residency`` (loading and unloading of services),
``supervisor`` (killing and restarting engines), ``quarantine`` (requests suspected of crashing engines),
``migrations`` (moving running requests) and ``repacking`` (migrations that a packer wants).
"""
