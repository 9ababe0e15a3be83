"""Chaos tests: engines and servers are killed under load, and answers compared with undisturbed runs."""
