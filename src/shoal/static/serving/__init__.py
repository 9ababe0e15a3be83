"""Serving static batches: what the global batcher assigns is run by real engines or by simulated ones.

Here belong the executor of padded batches, the engine and its workers, the offline interface and the
simulated cluster. Who shares a batch is decided in ``static.batching``. Importing this package imports no
torch; `shoal.static.serving.torch_executor` does.
"""
