"""Experiments of the Past-Future paper: output lengths forecast for admission."""
