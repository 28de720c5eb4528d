"""What an implementation says about itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Implementation(NamedTuple):
    """One of ``torch.ops.mindspeed`` on one backend; both functions get the operator's arguments.

    Attributes:
        takes: whether ``run`` computes this call. Also of arguments that fit nothing: the reference then complains.
        run: the operator.
    """

    takes: Callable[..., bool]
    run: Callable[..., Any]
