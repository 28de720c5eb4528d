"""Field types shared by the sections: strict values, with the few spellings that YAML makes ambiguous put right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError


class Section(BaseModel):
    """A strict, immutable mapping of the YAML file. Unknown keys and values of another type are errors."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Key and message of every value that is fine by itself and not together with the others."""
        yield from ()

    @model_validator(mode="before")
    @classmethod
    def _none_is_null(cls, values: Any) -> Any:
        """YAML spells null as ``null``; files made by Python programs often say ``None``, which YAML reads as text."""
        if isinstance(values, dict):
            return {key: None if value == "None" else value for key, value in values.items()}
        return values

    @model_validator(mode="after")
    def _raise_contradictions(self) -> Self:
        details = []
        for key, text in self.contradictions():
            kind = PydanticCustomError("contradiction", "{text}", {"text": text})
            details.append(InitErrorDetails(type=kind, loc=(key,), input=None))
        if details:
            raise ValidationError.from_exception_data(type(self).__name__, details)
        return self


def _number(value: Any) -> Any:
    """YAML 1.1 reads ``1e-4`` as text because it has no dot: a text that spells a number is that number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _switch(value: Any) -> Any:
    """MindSpeed LLM takes 1 and 0 for true and false, and its shipped files use them."""
    return bool(value) if type(value) is int and value in (0, 1) else value


Float = Annotated[float, BeforeValidator(_number)]
Bool = Annotated[bool, BeforeValidator(_switch)]


def _comma_separated(value: Any) -> Any:
    return value.split(",") if isinstance(value, str) else value


Floats = Annotated[list[Float], BeforeValidator(_comma_separated)]
"""A list of numbers; a text that separates them by commas is understood too, as LLaMA-Factory has them."""
