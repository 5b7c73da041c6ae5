"""Autoscaling policies: from what is known at one moment to how many devices of each kind are wanted.

A policy is a pure function of one `ScalingContext`: it reads no clock and keeps nothing. `control.periodic` asks one
every so often, and acquires, releases and plans accordingly. Each policy is in a file of its own, named after what it
follows: the algorithms of gpulet and HetSev, and as baselines those of autoscalers in use.
"""

from __future__ import annotations

from cotenant.control.scaling.context import Observation, ScalingContext, ScalingPolicy

__all__ = ["Observation", "ScalingContext", "ScalingPolicy"]
