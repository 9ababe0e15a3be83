"""Fits the constants of the analytic latency models to measured step times, and prints their errors."""
