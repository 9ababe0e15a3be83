"""Prometheus metrics: the /metrics page."""
