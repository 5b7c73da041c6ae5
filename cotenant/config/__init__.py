"""Read files that people write into values, with their units.

An error names the file, the key and what to write instead.
"""

from __future__ import annotations

from cotenant.config.interference import read_samples_file
from cotenant.config.problem import read_problem, read_profiles_file
from cotenant.config.settings import ModelSettings, MpsSettings, Settings, read_settings
from cotenant.config.workload import read_failures, read_workload

__all__ = [
    "ModelSettings",
    "MpsSettings",
    "Settings",
    "read_failures",
    "read_problem",
    "read_profiles_file",
    "read_samples_file",
    "read_settings",
    "read_workload",
]
