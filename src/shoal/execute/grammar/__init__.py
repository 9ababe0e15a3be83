"""Grammars: which tokens may come next, computed in processes of their own."""
