"""Answer the recommender's calls over gRPC, and keep what is learnt."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any

from grpc_health.v1 import health

from cotenant.core.units import parse_share
from cotenant.errors import ConfigError, PlanError, StateConflictError, StateError
from cotenant.k8s.grpc_method import MAX_MESSAGE, unary_method
from cotenant.k8s.recommender.matrices import SAMPLES, Matrices, written
from cotenant.k8s.recommender.state import StateStore
from cotenant.live.access import Access, Permission
from cotenant.live.grpc.health import HealthMethods
from cotenant.live.grpc.listener import GrpcListener
from cotenant.predictors import Load
from cotenant.predictors.samples import Sample
from cotenant.protocol.recommender import SERVICE, recommender

logger = logging.getLogger(__name__)

ATTEMPTS = 5  # to write what was learnt, where others write, too


class RecommenderService:
    """Recommend by what was measured. store: keeps it; None: it lasts as long as this process."""

    def __init__(self, matrices: Matrices, store: StateStore | None = None, version: str = "") -> None:
        """version: of what the store has, which `matrices` was read from."""
        self._matrices = matrices
        self._store = store
        self._version = version
        self._learning = asyncio.Lock()

    @property
    def matrices(self) -> Matrices:
        """What is known now."""
        return self._matrices

    def listener(self, tls: ssl.SSLContext | None = None, access: Access | None = None) -> GrpcListener:
        """Return what serves on a socket. tls: None to serve in the clear. access: holds the tokens of callers; None:
        anybody may call. Its health needs none."""
        calls: dict[str, tuple[Any, Callable[[Any], Any]]] = {
            "Isolated": (recommender.IsolatedRequest, self._isolated),
            "Interference": (recommender.InterferenceRequest, self._interference),
            "Observe": (recommender.ObserveRequest, self._observe),
            "Matrices": (recommender.MatricesRequest, self._all),
        }
        methods = {name: unary_method(kind, answer, Permission.INFER) for name, (kind, answer) in calls.items()}
        healthy = HealthMethods({"": lambda: True, SERVICE: lambda: True}).methods()
        services = {SERVICE: methods, health.SERVICE_NAME: healthy}
        return GrpcListener(services, message_size=MAX_MESSAGE, access=access, tls=tls)

    async def _isolated(self, request: Any) -> Any:
        share = parse_share(request.share_pct, "share_pct")
        if not request.slo_ms > 0:
            raise ConfigError(f"slo_ms: {request.slo_ms:g} must be above 0")
        rate = await asyncio.to_thread(self._matrices.rate, request.model, request.kind, share, request.slo_ms / 1e3)
        return recommender.IsolatedResponse(qps=rate.qps, batch=rate.batch, measured=rate.measured)

    async def _interference(self, request: Any) -> Any:
        victim, colocated = _load(request.victim), tuple(map(_load, request.colocated))
        slowdown = await asyncio.to_thread(self._matrices.slowdown, victim, colocated)
        return recommender.InterferenceResponse(slowdown=slowdown, lost=1 - 1 / slowdown)

    async def _observe(self, request: Any) -> Any:
        samples = [
            Sample(_load(each.victim), tuple(map(_load, each.colocated)), each.alone_ms / 1e3, each.together_ms / 1e3)
            for each in request.samples
        ]
        async with self._learning:
            learnt = await self._learn(samples)
        return recommender.ObserveResponse(revision=learnt.revision, samples=len(learnt.samples))

    async def _learn(self, samples: list[Sample]) -> Matrices:
        """Learn from samples, and keep them, also where they are too few as yet. Raises PlanError for samples that no
        predictor can be fitted to any more, StateError where they cannot be kept: then nothing is learnt."""
        for _ in range(ATTEMPTS):
            learnt = self._matrices.learnt(samples)
            fault = await asyncio.to_thread(lambda: learnt.unfitted)  # noqa: B023  # awaited at once
            if fault and not self._matrices.unfitted:
                if self._matrices.samples:
                    raise PlanError(fault)
                logger.info("nothing is predicted yet: %s", fault)
            if self._store is None:
                break
            try:
                self._version = await self._store.write(learnt.texts(), self._version)
                break
            except StateConflictError:  # another one has learnt, too
                state = await self._store.read()
                self._version = state.version
                if state.texts:
                    self._matrices = Matrices.read(state.texts, self._matrices.predictor)
        else:
            raise StateError(f"others have written what is kept {ATTEMPTS} times meanwhile; try again")
        self._matrices = learnt
        return learnt

    async def _all(self, request: Any) -> Any:
        matrices = self._matrices
        if request.revision == matrices.revision:
            return recommender.MatricesResponse(revision=matrices.revision)

        def encode() -> Any:
            return recommender.MatricesResponse(
                revision=matrices.revision,
                profiles_csv=written(matrices.completed.values()),
                samples_csv=matrices.texts().get(SAMPLES, ""),
                predictor_json=matrices.predictor_json(),
            )

        return await asyncio.to_thread(encode)


def _load(message: Any) -> Load:
    return Load(message.model, message.kind, message.batch, parse_share(message.share_pct, "share_pct"))
