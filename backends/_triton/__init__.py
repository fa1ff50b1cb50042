"""Triton kernels and their launchers. Nothing outside the backends imports this."""
