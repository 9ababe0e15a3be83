"""Experiments of the SeaLLM paper: scheduling and placement of many services on shared engines."""
