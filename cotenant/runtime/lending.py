"""Lend idle CPU time: a board in shared memory on which lanes see whether others need the cores that they share.

With lending a share is a floor. A worker that is ahead of its share may go on, instead of being held until its CPU
throttle is due, as long as no other lane of its cores is at work. Work that is conserved this way comes back as soon as
a batch ends: the worker that used it is held to its share again. Among workers that are held, the one that is due first
goes first, as in earliest-deadline-first scheduling, so that what is lent goes round by shares.

The server writes whether a lane has work, from handing a batch over until no further batch follows it at once; a worker
writes until when it is held. Each field has one writer and is eight bytes long, so that none is ever seen half written.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

SLOTS: Final = 512
SLOT_SIZE: Final = 128  # bytes: has work, held until, and the bits of its cores
BOARD_SIZE: Final = SLOTS * SLOT_SIZE  # slot 0 is the header: how many slots have ever been in use
_FIELDS: Final = SLOT_SIZE // 8
_WORK: Final = 0
_HELD: Final = 1
_CORES: Final = 16  # byte of a slot at which the bits begin
_MAX_CORES: Final = 8 * (SLOT_SIZE - _CORES)

# Seconds between two looks of a worker that is held: a part of what it has left to wait, within bounds.
MIN_LOOK: Final = 0.001
MAX_LOOK: Final = 0.004
LOOK_PART: Final = 1 / 4

# Seconds that a worker is credited with at most for a batch that ended later than its share alone would have let it.
MAX_CREDIT: Final = 0.05


class LendingBoard:
    """memory: BOARD_SIZE bytes that the server shares with its workers. fresh: clear what was there before."""

    def __init__(self, memory: memoryview, *, fresh: bool = False) -> None:
        if fresh:
            memory[:] = bytes(len(memory))
        self._memory = memory
        self._fields = memory.cast("d")

    # The server's side

    def open(self, cores: Collection[int]) -> int | None:
        """Take a slot for a lane that runs on these cores; None if all slots are taken."""
        used = int(self._fields[0])
        slot = next((slot for slot in range(1, used + 1) if not any(self._core_bytes(slot))), used + 1)
        if slot == SLOTS:
            return None
        self.move(slot, cores)
        self._fields[0] = max(used, slot)
        return slot

    def move(self, slot: int, cores: Collection[int]) -> None:
        """Let a lane run on other cores."""
        bits = sum({1 << core % _MAX_CORES for core in cores})
        self._core_bytes(slot)[:] = bits.to_bytes(SLOT_SIZE - _CORES, "little")

    def close(self, slot: int) -> None:
        """Give a slot back."""
        self.clear(slot)
        self.move(slot, ())

    def clear(self, slot: int) -> None:
        """Forget what a worker wrote that is gone, and its work."""
        self._fields[slot * _FIELDS + _WORK] = 0.0
        self._fields[slot * _FIELDS + _HELD] = 0.0

    def set_work(self, slot: int, has_work: bool) -> None:
        self._fields[slot * _FIELDS + _WORK] = float(has_work)

    # The worker's side

    def hold(self, slot: int, due: float) -> None:
        """Post that a lane's worker has nothing to compute until `due`."""
        self._fields[slot * _FIELDS + _HELD] = due

    def resume(self, slot: int) -> None:
        """Post that a lane's worker is held no longer."""
        self._fields[slot * _FIELDS + _HELD] = 0.0

    def may_resume(self, slot: int) -> bool:
        """Tell whether a worker that is held may go on: no other lane of its cores is at work, or is held and due
        before it."""
        fields = self._fields
        own = self._cores(slot)
        turn = (fields[slot * _FIELDS + _HELD], slot)
        for other in range(1, int(fields[0]) + 1):
            place = other * _FIELDS
            if other == slot or not fields[place + _WORK]:
                continue
            held = fields[place + _HELD]
            if (not held or (held, other) < turn) and own & self._cores(other):
                return False
        return True

    def _core_bytes(self, slot: int) -> memoryview:
        return self._memory[slot * SLOT_SIZE + _CORES : (slot + 1) * SLOT_SIZE]

    def _cores(self, slot: int) -> int:
        return int.from_bytes(self._core_bytes(slot), "little")


class Borrower:
    """A worker's place on the board, for the loop that holds its batches back."""

    def __init__(self, board: LendingBoard, slot: int) -> None:
        self._board = board
        self._slot = slot

    def hold(self, due: float) -> None:
        self._board.hold(self._slot, due)

    def resume(self) -> None:
        self._board.resume(self._slot)

    def may_resume(self) -> bool:
        return self._board.may_resume(self._slot)


def look_interval(left: float) -> float:
    """Return the seconds until a held worker looks at the board again, with so many left until it is due."""
    return min(left, max(MIN_LOOK, min(MAX_LOOK, left * LOOK_PART))) if left < math.inf else MAX_LOOK
