"""Messages: one logger for the package, rank 0 tells what happens and every rank tells what goes wrong."""

from __future__ import annotations

import logging
import sys

from rich.console import Console
from rich.logging import RichHandler

logger = logging.getLogger("mindspeed_llm")


def set_up_logging(rank: int, level: int = logging.INFO) -> None:
    """Send this package's messages to stderr: coloured on a terminal, plain lines otherwise.

    Ranks other than 0 only report warnings. Calling it again replaces the earlier handler.
    """
    if sys.stderr.isatty():
        handler: logging.Handler = RichHandler(
            console=Console(stderr=True), show_path=False, omit_repeated_times=False, log_time_format="%H:%M:%S"
        )
    else:
        handler = logging.StreamHandler()
        prefix = f"[rank {rank}] " if rank else ""
        handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(levelname)s %(message)s", "%H:%M:%S"))
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level if rank == 0 else logging.WARNING)
