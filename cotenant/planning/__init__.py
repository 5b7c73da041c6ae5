"""Plans on demand, validated by simulation, and the studies that need many: fleet sizes and what-if scenarios."""

from __future__ import annotations

from cotenant.planning.pipeline import plan

__all__ = ["plan"]
