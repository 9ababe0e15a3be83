"""Profiles in files: measured layer times, read and made into step times."""
