"""Two services with SLOs on one engine under several policies, and on dedicated engines."""
