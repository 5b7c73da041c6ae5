"""Keep the lending board of a pool: which lanes are on it, and which have work."""

from __future__ import annotations

from collections.abc import Collection

from cotenant.core.identity import LaneId
from cotenant.runtime.lending import BOARD_SIZE, LendingBoard
from cotenant.worker.arena import Arena, Block


class Lending:
    """The board is in the arena from the first lane on that is to be on it. A lane for which there is no place keeps to
    its share."""

    def __init__(self, arena: Arena) -> None:
        self.board: LendingBoard | None = None
        self._arena = arena
        self._block: Block | None = None
        self._slots: dict[LaneId, int] = {}

    def open(self, lane: LaneId, cores: Collection[int]) -> None:
        """Give a lane a place, or the place that it has other cores."""
        if self._block is None and (block := self._arena.allocate(BOARD_SIZE)) is not None:
            self._block, self.board = block, LendingBoard(block.view, fresh=True)
        if self.board is None:
            return
        if lane in self._slots:
            self.board.move(self._slots[lane], cores)
        elif (slot := self.board.open(cores)) is not None:
            self._slots[lane] = slot

    def place(self, lane: LaneId) -> tuple[int, int]:
        """Return what `Setup.board` tells the lane's worker."""
        return (self._block.offset, self._slots[lane]) if self._block is not None and lane in self._slots else (0, 0)

    def has_work(self, lane: LaneId, has_work: bool) -> None:
        if self.board is not None and lane in self._slots:
            self.board.set_work(self._slots[lane], has_work)

    def clear(self, lane: LaneId) -> None:
        """Hear that a lane's worker is gone."""
        if self.board is not None and lane in self._slots:
            self.board.clear(self._slots[lane])

    def close(self, lane: LaneId) -> None:
        """Hear that a lane is gone. Harmless where it has no place."""
        if self.board is not None and lane in self._slots:
            self.board.close(self._slots.pop(lane))

    def stop(self) -> None:
        """Give the board's memory back, once there is no worker."""
        self.board = self._block = None
