"""Requests that leave an engine with their KV and come to another, as one engine sees it."""
