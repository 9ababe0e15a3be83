"""Structured output: token masks of grammars, computed by llguidance in separate processes."""
