"""What the connections of a server share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cotenant.live.access import Access, Permission
from cotenant.live.grpc.misuse import MAX_RAPID
from cotenant.live.limits import Limits, MemoryBudget

if TYPE_CHECKING:
    from cotenant.live.grpc.call import Method
    from cotenant.live.grpc.connection import Connection


class Shared:
    """Hold what all connections need.

    log_access: write a line of the access log for each call. methods: by path. free: permissions that everybody has.
    rapid_resets: see `Misuse`. message_size: of the largest message, in bytes. memory: what messages take that are not
    complete, or not taken.
    empty: set once a draining server has no connection left.
    """

    def __init__(
        self,
        methods: Mapping[bytes, Method],
        access: Access,
        message_size: int,
        limits: Limits,
        memory: MemoryBudget | None = None,
        *,
        log_access: bool = False,
        rapid_resets: int = MAX_RAPID,
    ) -> None:
        self.methods = methods
        self.access = access
        self.free = frozenset(permission for permission in Permission if access.is_free(permission))
        self.message_size = message_size
        self.limits = limits
        self.memory = MemoryBudget(limits.memory) if memory is None else memory
        self.log_access = log_access
        self.rapid_resets = rapid_resets
        self.open: set[Connection] = set()
        self.draining = False
        self.empty = asyncio.Event()
