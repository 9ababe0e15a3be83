"""Operators' routes: engines, services, who may change them, and work that takes long."""
