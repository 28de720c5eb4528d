"""Field types shared by the sections: strict values, with the few spellings that YAML makes ambiguous put right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

DType = Literal["bf16", "fp16", "fp32"]
ColumnRole = Literal["prompt", "query", "response", "history", "messages", "system", "tools"]
TagName = Literal[
    "role_tag", "content_tag", "user_tag", "assistant_tag", "observation_tag", "function_tag", "system_tag"
]


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


def blended_files(value: Any) -> Any:
    """A list of weights and paths in turn, as Megatron's ``--data-path`` has them, or of paths, as a mapping."""
    if not isinstance(value, list):
        return value
    if all(isinstance(item, str) for item in value) and not any(isinstance(_number(item), float) for item in value):
        return dict.fromkeys(value)
    paths = value[1::2]
    if len(value) % 2 or len(set(map(str, paths))) < len(paths):
        raise ValueError(f"must be weights and different paths in turn: [0.3, PATH, 0.7, PATH], got {value}")
    return dict(zip(paths, value[::2], strict=True))


def _positive_weights(value: dict[str, float | None]) -> dict[str, float | None]:
    weights = [weight for weight in value.values() if weight is not None]
    if not value or (weights and (len(weights) < len(value) or min(weights) <= 0)):
        raise ValueError(f"every path of a blend must have a weight above 0, or none of them one, got {value}")
    return value


BlendedFiles = Annotated[dict[str, Float | None], BeforeValidator(blended_files), AfterValidator(_positive_weights)]
"""Paths with their weights, or without."""
