"""Pass requests from a front end to the dispatcher, and outcomes back."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Sequence

from cotenant.core.tensor import Tensor, total_bytes
from cotenant.errors import NotFoundError, RequestError, UnavailableError
from cotenant.live.deployment import Deployment, ServableModel, applications_of, is_loaded, serves
from cotenant.live.driver import Driver, Tensors
from cotenant.live.ensemble import EnsembleTensors
from cotenant.live.limits import MAX_AT_ONCE
from cotenant.live.oip import OVERLOADED, Done, InferRequest, InferResponse, check_request, rejection
from cotenant.live.preparation import Preparations
from cotenant.live.response_cache import Key, ResponseCache, copied, key_of
from cotenant.live.rollout_driver import RolloutDriver
from cotenant.live.serving_observer import ServingObserver
from cotenant.live.serving_state import ServingState
from cotenant.live.shared_memory import SharedTensors
from cotenant.live.threads import run_in_thread
from cotenant.runtime.admission_state import AdmissionState, model_targets

# Seconds between two polls of workers while callers keep the event loop busy. A lane idles until it gets its next
# batch, but one that gets it in the middle of a round gets what was read so far, rather than all: that matters less
# where batches are full.
POLL_INTERVAL = 0.001
DUE_INTERVAL = 0.00025  # the same once a full batch should have ended
NO_REQUEST = 0  # the id of a request that the driver has not heard of; it counts from 1
DRAIN_INTERVAL = 0.01  # seconds between two checks for requests in flight while the server drains


class InferenceService:
    """Admit requests, give each its deadline, and answer its caller once."""

    def __init__(
        self,
        state: ServingState,
        driver: Driver,
        rollouts: RolloutDriver,
        observer: ServingObserver,
        cache: ResponseCache | None = None,
    ) -> None:
        """cache: of answers, for the models that ask for it; None: there is none."""
        self._observer = observer
        self._cache = cache
        self._state = state
        self._driver = driver
        self._rollouts = rollouts
        self._preparations = Preparations(driver.cancel, observer.ended_unsubmitted)
        self._polled = 0.0  # when the workers were last polled on behalf of a request
        # How long requests waited that were rejected unread, by model.
        self._unread: defaultdict[str, list[float]] = defaultdict(list)

    def infer(self, request: InferRequest, done: Done, *, lost: float = 0.0) -> int:
        """Submit a request and return its handle; `done` is called once, perhaps before this returns.

        Its deadline is the least of its timeout (else the model's default, usually its target) and its caller's
        patience, less what is lost in the front end. Raises UnavailableError while the server does not accept requests.
        """
        state = self._state
        if not state.accepting:
            raise UnavailableError("the server is starting, or shutting down", retry_after=1.0)
        self.poll()
        offered = state.deployment.offered[request.model]
        # What is unloaded has no answer any more, whatever is still kept.
        if self._cache is not None and offered.caches and serves(state.deployment, request.model):
            return self._infer_cached(self._cache, request, offered, done, lost)
        if request.shared is not None:
            return self._infer_shared(request, request.shared, offered, done, lost)
        return self._submit(request, offered, done, lost)

    def _infer_shared(
        self, request: InferRequest, shared: SharedTensors, offered: ServableModel, done: Done, lost: float
    ) -> int:
        """Copy what lies in shared memory, then submit the request."""
        began = time.monotonic()

        def submit(_: None, done: Done) -> int:
            return self._submit(request, offered, done, lost + time.monotonic() - began)

        within = _within(request, offered) - lost
        return self._preparations.prepare(request.model, shared.copy, shared.size, submit, done, within=within)

    def _infer_cached(
        self, cache: ResponseCache, request: InferRequest, offered: ServableModel, done: Done, lost: float
    ) -> int:
        """Answer from the cache, or keep the answer there."""
        began = time.monotonic()
        number = cache.number(offered)

        def work() -> Key:
            if request.shared is not None:
                request.shared.copy()
            return key_of(offered.info.name, number, request.inputs)

        def submit(key: Key, done: Done) -> int:
            return self._look_up(cache, key, request, offered, done, lost, began)

        return self._preparations.prepare(
            request.model, work, total_bytes(request.inputs), submit, done, within=_within(request, offered) - lost
        )

    def _look_up(
        self,
        cache: ResponseCache,
        key: Key,
        request: InferRequest,
        offered: ServableModel,
        done: Done,
        lost: float,
        began: float,
    ) -> int:
        """Answer from the cache, or submit the request and keep its answer there. What is answered from it is counted
        as served, and not as work that plans are made for."""
        outputs = cache.get(key)
        now = time.monotonic()
        if outputs is not None:
            self._observer.answered_from_cache(request.model, began, now)
            done(InferResponse(model=offered.info.name, version=offered.info.version, id=request.id, outputs=outputs))
            return NO_REQUEST
        self._observer.missed_in_cache(request.model, now - began)

        def kept(result: InferResponse | RequestError) -> None:
            if isinstance(result, InferResponse):
                _keep(cache, key, result.outputs)
            done(result)

        return self._submit(request, offered, kept, lost + now - began)

    def _submit(self, request: InferRequest, offered: ServableModel, done: Done, lost: float) -> int:
        """Submit a request that was checked against `offered`, perhaps before a thread prepared it. Raises RequestError
        where the model has changed meanwhile, and takes it no longer."""
        current = self._state.deployment.offered.get(request.model)
        if current is None:
            raise NotFoundError(f"model '{request.model}' was unloaded before the request was ready")
        if not is_loaded(self._state.deployment, request.model):
            # It misses no target, and is no load: nobody is to serve it.
            raise UnavailableError(rejection(request.model, _unloaded(self._state.deployment, offered)))
        if current is not offered:
            if request.version not in ("", current.info.version):
                raise NotFoundError(
                    f"version '{request.version}' of model '{request.model}' was replaced before the request was ready"
                )
            check_request(current.info, request.inputs, ())
            offered = current
        info = offered.info
        priority = request.priority if offered.policy is None else offered.policy.priority(request.priority)

        def answered(result: Tensors | RequestError) -> None:
            if isinstance(result, RequestError):
                done(result)
            else:
                done(InferResponse(model=info.name, version=info.version, id=request.id, outputs=result))

        return self._driver.submit(
            request.model,
            request.inputs if offered.ensemble is None else EnsembleTensors(offered.ensemble, request.inputs),
            answered,
            within=_within(request, offered) - lost,
            size=request.inputs[0].shape[0] if info.max_batch_size else 1,
            priority=priority if priority > 0 else 0,
            trace=request.traceparent,
        )

    @property
    def shortest_target(self) -> float:
        """The shortest time in seconds that a request has which does not say it, of all models; 0 without models."""
        return min(map(_default_timeout, self._state.deployment.offered.values()), default=0.0)

    def would_reject(self, model: str, version: str, lost: float) -> bool:
        """Return whether a request of one row would be rejected now, with `lost` seconds less than the model's target.
        False where a front end is to read it in any case, for want of a lane or of a model to ask about."""
        offered = self._state.deployment.offered.get(model)
        if offered is None or offered.ensemble is not None or version not in ("", offered.info.version):
            return False
        self.poll()
        within = _default_timeout(offered) - lost
        return self._state.accepting and self._driver.would_reject(model, within=within)

    def room(self, model: str) -> tuple[int, float]:
        """Return how many requests of one row, without a timeout of their own, would be admitted now, and how many
        seconds the first may have lost; -1 for their number where that is not known."""
        offered = self._state.deployment.offered.get(model)
        if offered is None or offered.ensemble is not None or not self._state.accepting:
            return -1, 0.0
        return self._driver.room(model, within=_default_timeout(offered))

    def admission(self) -> AdmissionState:
        """Describe what admission knows now."""
        self.poll()
        deployment = self._state.deployment
        timeouts = {
            name: _default_timeout(offered) for name, offered in deployment.offered.items() if serves(deployment, name)
        }
        return AdmissionState(
            accepting=self._state.accepting,
            models=model_targets(timeouts, applications_of(deployment)),
            lanes=self._driver.lane_states(),
        )

    def reject_unread(self, model: str, waited: float) -> None:
        """Count a request that a front end has rejected `waited` seconds after it came. It is counted at the end of the
        round of the event loop, with all others of the round."""
        if model not in self._observer.models or not is_loaded(self._state.deployment, model):
            return  # also whatever name a caller made up
        if not self._unread:
            asyncio.get_running_loop().call_soon(self._count_unread)
        self._unread[model].append(waited)

    def _count_unread(self) -> None:
        unread, self._unread = self._unread, defaultdict(list)
        for model, waited in unread.items():
            self._driver.arrived[model] += len(waited)
            self._driver.rows[model] += len(waited)  # at least: the controller plans for them
            self._observer.rejected_unread(model, waited, OVERLOADED)

    def poll(self) -> None:
        """Take what workers have answered, which the event loop would do only after all callers that have data; nothing
        if that was done just now."""
        if not self._driver.at_work:
            return
        now = time.monotonic()
        if now - self._polled > (POLL_INTERVAL if now < self._driver.full_batch_due else DUE_INTERVAL):
            self._polled = now
            self._rollouts.poll()

    def cancel(self, handle: int) -> None:
        """Cancel a request whose caller left. Harmless where it has ended."""
        if handle < 0:
            self._preparations.cancel(handle)
        else:
            self._driver.cancel(handle)

    def open(self) -> None:
        """Accept requests from now on."""
        self._state.accepting = True

    async def drain(self, grace: float) -> None:
        """Accept no further requests, and wait for those in flight, for `grace` seconds at most."""
        self._state.accepting = False
        deadline = time.monotonic() + grace
        while (self._driver.in_flight or self._preparations) and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_INTERVAL)


def _unloaded(deployment: Deployment, offered: ServableModel) -> str:
    """Say what is unloaded: a model, or one of an ensemble's steps."""
    steps = () if offered.ensemble is None else sorted(offered.ensemble.models)
    return next((f"{model} is unloaded" for model in steps if not is_loaded(deployment, model)), "it is unloaded")


def _within(request: InferRequest, offered: ServableModel) -> float:
    """Return the seconds that a request has from its arrival."""
    return min(
        _default_timeout(offered) if request.timeout is None else request.timeout,
        math.inf if request.patience is None else request.patience,
    )


def _default_timeout(offered: ServableModel) -> float:
    """Return the seconds that a request has which does not say it."""
    timeout = None if offered.policy is None else offered.policy.timeout
    return offered.model.slo if timeout is None else timeout


def _keep(cache: ResponseCache, key: Key, outputs: Sequence[Tensor]) -> None:
    """Keep an answer, copied in a thread where that takes long."""
    size = total_bytes(outputs)
    if not cache.accepts(key, size):
        return
    if size <= MAX_AT_ONCE:
        cache.put(key, copied(outputs), size)
    else:
        run_in_thread(lambda copying: cache.put(key, copying.result(), size), copied, outputs)
