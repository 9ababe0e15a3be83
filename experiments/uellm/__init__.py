"""Experiments of the UELLM paper: batching by predicted length, and device maps."""
