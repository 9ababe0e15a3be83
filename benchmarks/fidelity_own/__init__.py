"""Simulator fidelity: the same requests in simulation and on the real engine of this machine."""
