"""Tokenizers: loading, encoding, decoding, vocabularies, and the process that encodes for a server."""
