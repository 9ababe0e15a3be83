"""Experiments of the MELL paper: packing requests onto few engines, with migration."""
