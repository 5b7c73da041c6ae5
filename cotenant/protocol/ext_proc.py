"""Load the messages of Envoy's external processing service."""

from __future__ import annotations

from cotenant.protocol import Messages

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"

ext_proc = Messages("ext_proc.bin", "envoy.service.ext_proc.v3")
