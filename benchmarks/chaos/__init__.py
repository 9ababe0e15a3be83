"""Chaos tests: engines and servers under load are killed, and every answer is compared with a quiet run's."""
