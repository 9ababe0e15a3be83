"""``shoal demo``: the command, its servers, its client and its report."""
