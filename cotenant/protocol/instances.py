"""Load the messages of the instance controller."""

from __future__ import annotations

from cotenant.protocol import Messages

SERVICE = "cotenant.instances.v1.Instances"

instances = Messages("instances.bin", "cotenant.instances.v1")
