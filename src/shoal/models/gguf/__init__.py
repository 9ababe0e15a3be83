"""GGUF files: reading their metadata, and what a conversion makes of it."""
