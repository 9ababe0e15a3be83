"""Paged attention over the KV pool: buffers, tensor views, attention backends, and the backend selector."""
