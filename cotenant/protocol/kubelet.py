"""Load the messages of the kubelet's APIs for plugins: registration, and Dynamic Resource Allocation."""

from __future__ import annotations

from typing import Final

from cotenant.protocol import Messages

DRA_SERVICE: Final = "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
DRA_VERSION: Final = "v1.DRAPlugin"  # what a plugin that serves it says on registration
REGISTRATION_SERVICE: Final = "pluginregistration.Registration"

dra = Messages("dra.bin", "k8s.io.kubelet.pkg.apis.dra.v1")
registration = Messages("pluginregistration.bin", "pluginregistration")
