"""Static batching: requests are padded to one length and served as a batch until all of them end.

This package is separate from continuous batching. ``batching`` forms batches and assigns them to workers; it
is pure, on the layer of ``schedule``. ``serving`` runs batches, real or simulated, above ``engine`` and
``simulate``.
"""
