"""Executing steps on GPUs."""
