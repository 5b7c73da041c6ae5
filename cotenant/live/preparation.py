"""Do what a request needs before it can be submitted, such as a copy or a hash of its tensors: in a thread where that
would keep others waiting."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from cotenant.core.request import Outcome
from cotenant.errors import CancelledError, FailedError, RequestError, UnavailableError
from cotenant.live.limits import MAX_AT_ONCE
from cotenant.live.oip import UNEXPECTED, Done, InferResponse
from cotenant.live.threads import run_in_thread

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class Preparations:
    """Prepare requests, and pass on those whose callers have stayed.

    A request that is prepared in a thread has a negative handle, since it has no id yet. cancel_submitted: cancels a
    request by its id. count: counts one that has ended before it was submitted.
    """

    def __init__(self, cancel_submitted: Callable[[int], None], count: Callable[[str, float, Outcome], None]) -> None:
        self._cancel_submitted = cancel_submitted
        self._count = count
        self._open: dict[int, _Prepared] = {}  # by handle, until the request has ended
        self._started = 0

    def __len__(self) -> int:
        """Return the number of requests that are being prepared, or were and have not ended."""
        return len(self._open)

    def prepare(
        self,
        model: str,
        work: Callable[[], _T],
        size: int,
        submit: Callable[[_T, Done], int],
        done: Done,
        *,
        within: float,
    ) -> int:
        """Do the work of a request for a model, then submit it with the result; return its handle.

        size: bytes that the work has to do with. within: seconds from now after which it expires. Raises RequestError's
        children, or passes them to `done`, where the work does.
        """
        if size <= MAX_AT_ONCE:
            return submit(work(), done)
        loop = asyncio.get_running_loop()
        self._started -= 1
        handle = self._started
        prepared = self._open[handle] = _Prepared(model, done, time.monotonic())

        def ended(result: InferResponse | RequestError) -> None:
            self._open.pop(handle, None)
            done(result)

        def worked(future: asyncio.Future[_T]) -> None:
            expiry.cancel()
            if handle not in self._open:
                return  # it has expired, or its caller left
            try:
                prepared.request_id = submit(future.result(), ended)
            except RequestError as error:
                ended(error)
            except Exception:
                logger.exception("a request for model '%s' could not be prepared", model)
                self._end(handle, Outcome.FAILED, FailedError(UNEXPECTED))

        expired = UnavailableError(f"request for model '{model}' expired: its inputs were not read in time")
        expiry = loop.call_later(within, self._end, handle, Outcome.EXPIRED, expired)
        run_in_thread(worked, work)
        return handle

    def cancel(self, handle: int) -> None:
        """Cancel a request. Harmless where it has ended."""
        prepared = self._open.get(handle)
        if prepared is None:
            return
        if prepared.request_id is not None:
            self._cancel_submitted(prepared.request_id)
            return
        left = CancelledError(f"request for model '{prepared.model}' cancelled: the caller left")
        self._end(handle, Outcome.CANCELLED, left)

    def _end(self, handle: int, outcome: Outcome, error: RequestError) -> None:
        """End a request that was not submitted, unless it has ended."""
        prepared = self._open.pop(handle, None)
        if prepared is not None:
            self._count(prepared.model, prepared.began, outcome)
            prepared.done(error)


class _Prepared:
    """Hold a request that is prepared in a thread. began: seconds. request_id: its id once it is
    submitted."""

    __slots__ = ("began", "done", "model", "request_id")

    def __init__(self, model: str, done: Done, began: float) -> None:
        self.began = began
        self.model = model
        self.done = done
        self.request_id: int | None = None
