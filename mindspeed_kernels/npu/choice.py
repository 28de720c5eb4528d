"""Which implementation an operator uses on an NPU: the environment variable MINDSPEED_NPU_IMPL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

VARIABLE = "MINDSPEED_NPU_IMPL"
IMPLEMENTATIONS = ("torch_npu", "ascendc", "reference")
OPERATORS = (
    "flash_attention",
    "grouped_gemm",
    "moe_permute",
    "moe_unpermute",
    "rms_norm",
    "rotary",
    "route",
    "swiglu",
)


@dataclass(frozen=True)
class Choice:
    """The implementation that each operator tries first."""

    default: str = IMPLEMENTATIONS[0]
    exceptions: Mapping[str, str] = field(default_factory=dict)

    def first(self, operator: str) -> str:
        return self.exceptions.get(operator, self.default)

    def order(self, operator: str) -> tuple[str, ...]:
        """What to try for a call, one after the other; the reference, which takes every call, is left out."""
        first = self.first(operator)
        return () if first == "reference" else (first, *(i for i in IMPLEMENTATIONS[:-1] if i != first))


def read_choice(text: str) -> Choice:
    """Read ``torch_npu|ascendc|reference[,operator=implementation ...]``; empty for the default.

    Raises:
        ValueError: the text names an implementation or an operator that there is not, or one operator twice.
    """
    default, exceptions = IMPLEMENTATIONS[0], {}
    for index, item in enumerate(part.strip() for part in text.split(",") if part.strip()):
        operator, equals, implementation = (part.strip() for part in item.partition("="))
        if not equals:
            if index > 0:
                raise ValueError(f"{VARIABLE}={text}: {item!r} is not operator=implementation")
            default = _known(operator, IMPLEMENTATIONS, "implementation", text)
        elif operator in exceptions:
            raise ValueError(f"{VARIABLE}={text}: {operator} is chosen twice")
        else:
            operator = _known(operator, OPERATORS, "operator", text)
            exceptions[operator] = _known(implementation, IMPLEMENTATIONS, "implementation", text)
    return Choice(default, exceptions)


def _known(name: str, names: tuple[str, ...], what: str, text: str) -> str:
    if name in names:
        return name
    near = get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"{VARIABLE}={text}: there is no {what} {name!r}, but {', '.join(names)}{hint}")
