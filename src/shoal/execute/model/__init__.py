"""Models: loading, checking that all attention is ours, and replacing layers by faster ones."""
