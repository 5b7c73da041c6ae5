"""Decide which replica takes a request, and which requests none can take in time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection

import msgspec

from cotenant.k8s.picker.replica import Replica
from cotenant.runtime.admission_state import AdmissionState

MAX_AGE = 1.0  # seconds after which a replica that has told nothing new takes no requests
CHOICES = 8  # replicas that are compared for a request, where one of them can answer it in time
SIMILAR = 0.05  # of a request's time: replicas that would finish it within that of the first are as good

NONE_READY = "no replica is ready"
NONE_IN_SUBSET = "no replica of those that the gateway offers is ready"
NO_WORKER = "no worker that holds the model is up"
TOO_LATE = "no replica could answer it within its deadline"


class Picked(msgspec.Struct, frozen=True):
    """The addresses to send a request to: the first, and the next best if that fails."""

    addresses: tuple[str, ...]


class Rejected(msgspec.Struct, frozen=True):
    """No replica would answer a request in time. retry_after: seconds after which one might."""

    reason: str
    retry_after: float


class Unavailable(msgspec.Struct, frozen=True):
    """There is no replica for a request."""

    reason: str


Decision = Picked | Rejected | Unavailable


class _Known:
    """A replica as it is known. seen: when it last told its state; asked: when it was asked for that. turn: the number
    of its last pick. sent: requests sent since it was asked, which it may not have known of yet: when, the model and
    the deadline."""

    __slots__ = ("address", "asked", "replica", "seen", "sent", "turn")

    def __init__(self, address: str) -> None:
        self.address = address
        self.replica: Replica | None = None
        self.seen = self.asked = -math.inf
        self.turn = 0
        self.sent: deque[tuple[float, str, float]] = deque()


class EndpointPicker:
    """Pick replicas, by what each told last and what it was sent since.

    A request goes to the replica that would finish it first. Of those that would finish it about then, the one that was
    picked longest ago is taken, so that equal replicas share equally. Of many, `CHOICES` are compared, in turn: a few
    choices balance nearly as well as all (Mitzenmacher, The power of two choices, 2001). All are asked before a request
    is rejected. Times are seconds of any monotonic clock.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}  # the one that was compared longest ago first
        # Models that no replica could take, and when the first would have finished: until one tells something new, a
        # request that is due sooner is rejected, too.
        self._full: dict[str, float] = {}
        self._picks = 0

    def observe(self, address: str, state: AdmissionState, asked: float, now: float) -> None:
        """Take the state that a replica told. asked, now: when it was asked, and when the answer came; it describes a
        moment between the two."""
        known = self._known.get(address)
        if known is None:
            known = self._known[address] = _Known(address)
            known.turn = self._picks
        known.replica = Replica(state, asked + (now - asked) / 2)
        known.seen, known.asked = now, asked
        self._full.clear()
        while known.sent and known.sent[0][0] < asked:
            known.sent.popleft()
        for at, model, deadline in known.sent:
            known.replica.admit(model, deadline, max(at, asked + (now - asked) / 2))

    def lose(self, address: str) -> None:
        """Forget a replica that does not answer, or is gone."""
        self._known.pop(address, None)

    def ready(self, now: float) -> int:
        """Return how many replicas take requests; from any thread."""
        return sum(_takes_requests(known, now) for known in list(self._known.values()))

    def pick(
        self, model: str | None, now: float, *, timeout: float | None = None, subset: Collection[str] | None = None
    ) -> Decision:
        """Pick the replica for a request. model: None for one that is no inference, or of a model that is not known.
        timeout: seconds that its caller waits; None: as long as the replica gives it. subset: addresses to pick from;
        None: all."""
        serving: list[tuple[_Known, Replica]] = []
        ready: list[_Known] = []
        for known in self._known.values():
            if (subset is None or known.address in subset) and _takes_requests(known, now):
                ready.append(known)
                if model is not None and known.replica is not None and known.replica.serves(model):
                    serving.append((known, known.replica))
        if not ready:
            return Unavailable(NONE_READY if subset is None else NONE_IN_SUBSET)
        if model is None or not serving:  # a replica says in its own words what it lacks
            ready.sort(key=_turn)
            self._note(ready[0])
            return Picked(tuple(known.address for known in ready[:2]))
        return self._pick_in_time(model, serving, timeout, now, all_asked=subset is None)

    def _pick_in_time(
        self,
        model: str,
        serving: list[tuple[_Known, Replica]],
        timeout: float | None,
        now: float,
        *,
        all_asked: bool,
    ) -> Decision:
        own = serving[0][1].timeout(model)
        deadline = now + (own if timeout is None or timeout > own else timeout)
        finish = self._full.get(model, -math.inf)
        if deadline < finish:
            return Rejected(TOO_LATE, finish - deadline)
        in_time: list[tuple[float, int, _Known]] = []
        finish = math.inf  # of the first of those that are late
        for number, (known, replica) in enumerate(serving):
            if number >= CHOICES and in_time:
                break
            predicted = replica.predict(model, deadline, now)
            if predicted.admitted:
                in_time.append((predicted.finish, known.turn, known))
            elif predicted.finish < finish:
                finish = predicted.finish
            self._known[known.address] = self._known.pop(known.address)
        if not in_time:
            if finish == math.inf:
                return Unavailable(NO_WORKER)
            if all_asked:
                self._full[model] = finish
            return Rejected(TOO_LATE, finish - deadline)
        limit = min(each[0] for each in in_time) + SIMILAR * (deadline - now)
        best = min((each for each in in_time if each[0] <= limit), key=lambda each: each[1])
        chosen = best[2]
        self._note(chosen)
        assert chosen.replica is not None
        chosen.replica.admit(model, deadline, now)
        chosen.sent.append((now, model, deadline))
        others = [each for each in in_time if each is not best]
        return Picked((chosen.address, min(others, key=_order)[2].address) if others else (chosen.address,))

    def _note(self, known: _Known) -> None:
        self._picks += 1
        known.turn = self._picks


def _takes_requests(known: _Known, now: float) -> bool:
    return known.replica is not None and known.replica.accepting and now - known.seen <= MAX_AGE


def _turn(known: _Known) -> int:
    return known.turn


def _order(candidate: tuple[float, int, _Known]) -> tuple[float, int]:
    return candidate[:2]
