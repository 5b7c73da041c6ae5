"""Log why TLS with a front end failed, with the way out: once for each peer and reason, since front ends dial on."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

REPEAT = 600.0  # seconds after which a reason is logged again
MAX_REASONS = 64  # that are logged in that time: whoever reaches the address can make it fail

# A front end that does not accept the node's certificate closes at once: asyncio does not send the alert.
LEFT = (
    "it left before TLS was set up: it checked the port, or it does not accept this node's certificate, as its log says"
)
SILENT = "it did not set up TLS in time: it is stuck, or it is no front end"
_CLEAR = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST")


class TlsFailures:
    """Log failed TLS handshakes of a node. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged: dict[tuple[str, str], float] = {}  # host and reason → when

    def add(self, host: str, error: OSError) -> None:
        """Take the failure of a connection from a host."""
        reason = failure_reason(error)
        now = self._clock()
        self._logged = {key: at for key, at in self._logged.items() if now - at < REPEAT}
        if (host, reason) in self._logged or len(self._logged) >= MAX_REASONS:
            return
        self._logged[host, reason] = now
        level = logging.INFO if reason in (LEFT, SILENT) else logging.WARNING
        logger.log(level, "TLS with %s failed: %s", host, reason)


def failure_reason(error: OSError) -> str:
    """Return why TLS failed, and what to do about it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            "its certificate is not valid, or not one that this node's cluster.authority has signed: "
            f"{error.verify_message}; give both ends certificates of one authority"
        )
    if isinstance(error, ConnectionAbortedError) and error.errno is None:  # so event loops report a time-out
        return SILENT
    if not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLEOFError):
        return LEFT
    reason = error.reason or str(error)
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it shows no certificate; set cluster.certificate, key and authority there, too"
    if reason in _CLEAR:
        return (
            "it does not use TLS; give certificates (cluster.certificate, key and authority) to both ends, or to none"
        )
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        return (
            f"it does not accept this node's certificate ({reason}); cluster.authority there has to be the one that "
            "signed cluster.certificate here, for the address that it dials"
        )
    return f"{reason}; both ends need TLS 1.2 or later, and certificates of one authority"
