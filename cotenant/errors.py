"""Define every error that Cotenant raises on purpose.

    CotenantError
    ├── ConfigError        a file, a flag or an environment that cannot be used as it is
    ├── PlanError          an invalid problem (too little capacity is no error: a plan reports it)
    ├── ModelError         a model that cannot be loaded: not a model, an unsupported opset, no shape
    ├── RolloutError       a plan revision that did not come into force: superseded, aborted, too little memory
    ├── WorkerError        a worker that did not start, died, or failed a batch
    ├── DeviceError        a GPU, or its driver, that is absent, lost, or cannot do what is asked of it
    ├── LeaseError         another front end serves in place of this one
    ├── NodeError          a node that cannot be reached, refuses a front end, or breaks the protocol, and the reverse
    ├── KubernetesError    a call of a Kubernetes API server that is refused, or not answered
    ├── PrometheusError    a query of Prometheus that is refused, or not answered, or not with what was asked for
    ├── InstanceError      an instance that is not provisioned or released, or nobody tells which there are
    ├── ClaimError         a ResourceClaim that cannot be prepared: wrong, contradictory, or for more than is left
    ├── StateError         state that is kept elsewhere cannot be read or written
    │   └── StateConflictError  somebody else has written it since it was read
    └── RequestError       one inference request, or one call of the protocol, that is not answered
        ├── MalformedError     not the protocol: no JSON, a tensor too short
        ├── InvalidError       the protocol, but not this model's: wrong name, type or shape
        ├── NotFoundError      no such model or version
        ├── UnauthenticatedError  without a token, or with an unknown one
        ├── ForbiddenError     not for this caller
        ├── UnavailableError   rejected, expired or no worker ready; may be retried
        ├── UnsupportedError   a part of the protocol that this server does not offer
        ├── CancelledError     the caller left
        └── FailedError        the model or its worker failed

A message gives the value, the place and the way out, in one line. Nothing here knows of HTTP or gRPC: their
front ends map these classes to codes.
"""

from __future__ import annotations


class CotenantError(Exception):
    """Root of all errors that are meant for the user to read."""


class ConfigError(CotenantError):
    pass


class PlanError(CotenantError):
    pass


class ModelError(CotenantError):
    pass


class RolloutError(CotenantError):
    """``outcome`` is how its rollout ended."""

    def __init__(self, message: str, outcome: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class WorkerError(CotenantError):
    pass


class DeviceError(CotenantError):
    pass


class LeaseError(CotenantError):
    pass


class NodeError(CotenantError):
    pass


class KubernetesError(CotenantError):
    """``status`` is the HTTP status, 0 where there was no answer."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class PrometheusError(CotenantError):
    """``status`` is the HTTP status, 0 where there was no answer."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class InstanceError(CotenantError):
    pass


class ClaimError(CotenantError):
    """``holders`` are the uids of the claims that have what it asks for."""

    def __init__(self, message: str, holders: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.holders = holders


class StateError(CotenantError):
    pass


class StateConflictError(StateError):
    pass


class RequestError(CotenantError):
    pass


class MalformedError(RequestError):
    pass


class InvalidError(RequestError):
    pass


class NotFoundError(RequestError):
    pass


class UnauthenticatedError(RequestError):
    pass


class ForbiddenError(RequestError):
    pass


class UnavailableError(RequestError):
    """``retry_after`` is in seconds, 0 where nothing better is known."""

    def __init__(self, message: str, *, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class UnsupportedError(RequestError):
    pass


class CancelledError(RequestError):
    pass


class FailedError(RequestError):
    pass
