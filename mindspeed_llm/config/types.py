"""Field types shared by the sections: strict values, with the few spellings that YAML makes ambiguous put right."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator


class Section(BaseModel):
    """A strict, immutable mapping of the YAML file. Unknown keys and values of another type are errors."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _none_is_null(cls, values: Any) -> Any:
        """YAML spells null as ``null``; files written by Python programs often say ``None``, which YAML reads as text."""
        if isinstance(values, dict):
            return {key: None if value == "None" else value for key, value in values.items()}
        return values


def _number(value: Any) -> Any:
    """YAML 1.1 reads ``1e-4`` as text because it has no dot: a text that spells a number is that number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _switch(value: Any) -> Any:
    """The original took 1 and 0 for true and false, and shipped files use them."""
    return bool(value) if type(value) is int and value in (0, 1) else value


Float = Annotated[float, BeforeValidator(_number)]
Bool = Annotated[bool, BeforeValidator(_switch)]
