"""Tool calls: the formats of model families, parsing of outputs, grammars that force calls, and histories."""
