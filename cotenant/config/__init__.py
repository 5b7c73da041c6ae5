"""Read files that people write into values, with their units.

An error names the file, the key and what to write instead.
"""

from __future__ import annotations

from cotenant.config.devices import DeviceSettings
from cotenant.config.interference import read_samples_file
from cotenant.config.kubernetes import KubernetesSettings
from cotenant.config.models import ModelSettings
from cotenant.config.problem import read_problem, read_profiles_file
from cotenant.config.settings import MpsSettings, Settings, read_settings
from cotenant.config.workload import read_failures, read_workload

__all__ = [
    "DeviceSettings",
    "KubernetesSettings",
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
