"""Engines of padded batches, real and simulated, behind SCLS's global batcher.

The papers' engines serve a fixed group of requests: inputs are padded to the longest, and all rows are
computed until the last one ends. Shoal's own engine does not pad, so the papers' ratios are reproduced here.
``batcher`` assigns the batches of ``shoal.batches`` to workers; ``engine`` runs them with ``generate`` of
transformers, and ``cluster`` simulates them. Only ``torch_executor`` imports torch.
"""
