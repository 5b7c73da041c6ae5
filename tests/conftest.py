"""How Hypothesis searches: the same inputs in every run, however slow the machine is.

A failure then belongs to the change at hand. `pytest --hypothesis-profile random` searches other inputs each time;
what it finds becomes an `@example` or a test of its own.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", settings.get_profile("random"), derandomize=True)
settings.load_profile("repeatable")
