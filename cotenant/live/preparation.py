"""Do what a request needs before it can be submitted, such as a copy or a hash of its tensors: in a thread where that
would keep others waiting."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from cotenant.errors import CancelledError, FailedError, RequestError
from cotenant.live.limits import MAX_AT_ONCE
from cotenant.live.oip import UNEXPECTED, Done, InferResponse

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class Preparations:
    """Prepare requests, and pass on those whose callers have stayed.

    A request that is prepared in a thread has a negative handle, since it has no id yet. cancel_submitted: cancels a
    request by its id.
    """

    def __init__(self, cancel_submitted: Callable[[int], None]) -> None:
        self._cancel_submitted = cancel_submitted
        self._open: dict[int, _Prepared] = {}  # by handle, until the request has ended
        self._started = 0

    def __len__(self) -> int:
        """Return the number of requests that are being prepared, or were and have not ended."""
        return len(self._open)

    def prepare(
        self, model: str, work: Callable[[], _T], size: int, submit: Callable[[_T, Done], int], done: Done
    ) -> int:
        """Do the work of a request for a model, then submit it with the result; return its handle.

        size: bytes that the work has to do with. Raises RequestError's children, or passes them to `done`, where the
        work does.
        """
        if size <= MAX_AT_ONCE:
            return submit(work(), done)
        self._started -= 1
        handle = self._started
        prepared = self._open[handle] = _Prepared(model, done)

        def ended(result: InferResponse | RequestError) -> None:
            self._open.pop(handle, None)
            done(result)

        def worked(future: asyncio.Future[_T]) -> None:
            if handle not in self._open:
                return  # its caller left
            try:
                prepared.request_id = submit(future.result(), ended)
            except RequestError as error:
                ended(error)
            except Exception:
                logger.exception("a request for model '%s' could not be prepared", model)
                ended(FailedError(UNEXPECTED))

        asyncio.get_running_loop().run_in_executor(None, work).add_done_callback(worked)
        return handle

    def cancel(self, handle: int) -> None:
        """Cancel a request. Harmless where it has ended."""
        prepared = self._open.get(handle)
        if prepared is None:
            return
        if prepared.request_id is not None:
            self._cancel_submitted(prepared.request_id)
            return
        del self._open[handle]
        prepared.done(CancelledError(f"request for model '{prepared.model}' cancelled: the caller left"))


class _Prepared:
    """Hold a request that is prepared in a thread. request_id: its id once it is submitted."""

    __slots__ = ("done", "model", "request_id")

    def __init__(self, model: str, done: Done) -> None:
        self.model = model
        self.done = done
        self.request_id: int | None = None
