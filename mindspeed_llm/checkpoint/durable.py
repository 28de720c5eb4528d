"""Files that a loss of power does not take back."""

from __future__ import annotations

import os
from pathlib import Path


def fsync(path: Path) -> None:
    """Wait until the file, or the folder's list of entries, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
