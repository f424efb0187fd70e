"""Fakes that pass the same contracts as the real parts, and the simulator."""
