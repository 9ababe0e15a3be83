"""Conversion of GGUF files and tokenizers into Hugging Face folders, in a subprocess."""
