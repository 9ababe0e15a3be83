"""Errors and fits of the analytic step-time models against measured kernels and steps."""
