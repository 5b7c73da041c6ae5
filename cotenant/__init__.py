"""Serve many models on few shared accelerators, each within its latency target."""

__version__ = "0.1.0"
