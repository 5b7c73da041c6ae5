"""Obtain what a request costs the server's front end: as measured on this machine before, or measured now."""

from __future__ import annotations

import logging
import platform

from cotenant import __version__
from cotenant.errors import ConfigError
from cotenant.live.front_end_cost import measure_front_end
from cotenant.planners.front_end import REQUEST_SECONDS
from cotenant.profiling import cache
from cotenant.runtime.dispatcher import COMPILED

logger = logging.getLogger(__name__)

# Seconds that a measurement may give; what lies beyond is no measurement of a front end.
LEAST = 5e-6
MOST = 5e-3


def request_seconds() -> float:
    """Return the seconds of a processor that a small request takes of the server's process; REQUEST_SECONDS where that
    cannot be measured. It is measured once for each machine and version, beside the profiles. Not for an event loop."""
    circumstances = (cache.machine_fingerprint(), f"cotenant {__version__}", platform.python_version(), str(COMPILED))
    name = cache.cache_key("front end", *circumstances)
    known = cache.load_number(name)
    if known is not None and LEAST <= known <= MOST:
        return known
    measured = measure_front_end()
    if measured is None or not LEAST <= measured <= MOST:
        logger.info("the cost of the front end cannot be measured here; plans count %g s a request", REQUEST_SECONDS)
        return REQUEST_SECONDS
    measured = float(f"{measured:.2g}")  # what is more exact is noise, and would make other plans each time
    try:
        cache.store_number(name, measured)
    except ConfigError as error:  # whoever gives profiles needs no such folder; it is measured again the next time
        logger.info("%s", error)
    return measured
