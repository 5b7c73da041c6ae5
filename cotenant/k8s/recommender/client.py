"""Follow a recommender: fetch what it knows, and again when it has learnt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc
import msgspec

from cotenant.core.profile import Profiles
from cotenant.errors import ConfigError
from cotenant.k8s.grpc_channel import open_channel, unary_call
from cotenant.k8s.recommender.matrices import read_fitted
from cotenant.predictors import Interference
from cotenant.protocol.recommender import SERVICE, recommender

logger = logging.getLogger(__name__)

INTERVAL = 10.0  # seconds between two looks
TIMEOUT = 10.0  # seconds for an answer


class Recommendation(msgspec.Struct, frozen=True):
    """What a recommender knows: profiles with predicted points, and the predictor."""

    revision: str
    profiles: Profiles
    interference: Interference


class RecommenderClient:
    """Call a recommender. address: ``host:port``. authority: certificates (PEM) of who signed that of the
    service; None: in the clear. token: that it asks for; "": none."""

    def __init__(self, address: str, authority: bytes | None = None, token: str = "") -> None:
        self._metadata = (("authorization", f"Bearer {token}"),) if token else None
        self._channel = open_channel(address, authority)
        self._address = address

    async def fetch(self, revision: str = "") -> Recommendation | None:
        """Return what is known, None where that is the revision that the caller has. Raises ConfigError where it cannot
        be read, grpc.aio.AioRpcError where nothing answers."""
        request = recommender.MatricesRequest(revision=revision)
        answer = await self._call("Matrices", request, recommender.MatricesResponse)
        if answer.revision == revision:
            return None
        profiles, interference = read_fitted(answer.profiles_csv, answer.predictor_json)
        return Recommendation(answer.revision, profiles, interference)

    async def follow(self, learn: Callable[[Recommendation], None], interval: float = INTERVAL) -> None:
        """Call `learn` with what is known, and again when there is more, until cancelled. While the recommender does
        not answer, what it said last stands."""
        revision, answers = "", True
        while True:
            try:
                found = await self.fetch(revision)
            except (grpc.aio.AioRpcError, ConfigError) as error:
                if answers:
                    reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                    logger.warning("the recommender at %s does not answer: %s", self._address, reason)
                answers = False
            else:
                answers = True
                if found is not None:
                    learn(found)
                    revision = found.revision
                    logger.info("revision %s of the recommender at %s", revision, self._address)
            await asyncio.sleep(interval)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def _call(self, name: str, request: Any, answer: Any) -> Any:
        call = unary_call(self._channel, f"{SERVICE}/{name}", request, answer)
        return await call(request, timeout=TIMEOUT, metadata=self._metadata)
