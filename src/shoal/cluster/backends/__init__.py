"""Backends that run engine processes: ``local`` on this machine, ``ray`` on the machines of a Ray cluster."""
