"""KV migration: moving a running request with its KV from one engine to another, as one engine sees it."""
