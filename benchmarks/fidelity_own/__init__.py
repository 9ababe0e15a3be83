"""Simulator fidelity: the same requests simulated and on the real engine of this machine."""
