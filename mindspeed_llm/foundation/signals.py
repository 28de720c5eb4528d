"""SIGTERM and SIGINT as a wish to stop, not as a death."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Becomes true when the process was asked to stop."""

    def __init__(self) -> None:
        self.requested = False

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True


@contextmanager
def stop_on_signal(enabled: bool = True) -> Iterator[StopRequest]:
    """While the block runs, SIGTERM and SIGINT only set the request; a second SIGINT acts as usual."""
    request = StopRequest()
    if not enabled:
        yield request
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        request(number, frame)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, request),
        signal.SIGINT: signal.signal(signal.SIGINT, interrupt),
    }
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
