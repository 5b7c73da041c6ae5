"""Make plans validated by simulation, and run studies that need many of them: fleet sizes and what-if scenarios."""

from __future__ import annotations

from cotenant.planning.pipeline import plan

__all__ = ["plan"]
