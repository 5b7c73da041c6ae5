"""Load the messages of the recommender."""

from __future__ import annotations

from cotenant.protocol import Messages

SERVICE = "cotenant.recommender.v1.Recommender"

recommender = Messages("recommender.bin", "cotenant.recommender.v1")
