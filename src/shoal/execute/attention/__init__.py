"""Attention over the KV pool: buffers, views, the backends, and which of them a model gets."""
