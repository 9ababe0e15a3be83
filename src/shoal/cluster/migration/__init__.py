"""Requests that move between engines with their KV: what the manager keeps and decides of each."""
