"""Serving static batches: real engines and simulated ones run the batches of the global batcher.

This package has the executor of padded batches, the engine and its workers, the offline interface and the
simulated cluster. ``static.batching`` decides which requests are in a batch. Only ``torch_executor`` imports
torch.
"""
