"""Calls of tools: how models write them, how outputs are split into them, and grammars that ask for them."""
