"""Static batches: requests that are padded to one length and served together until all of them end.

Here belongs all that serves a model in whole batches, apart from the scheduler of iterations. ``batching``
decides who shares a batch and which worker serves it; it is pure, on the floor of ``schedule``. ``serving``
runs batches, for real or simulated, above ``engine`` and ``simulate``.
"""
