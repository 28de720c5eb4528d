"""The one form that every data format is turned into before a template writes it as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

Role = Literal["user", "assistant", "tool"]


class RowError(ValueError):
    """One row of the data cannot be used; the message says why. The row is skipped, reported and counted."""


class Content(str):
    """Text that came from the data, kept apart from the template's own so that it can be tokenised differently."""


def check_text(text: str) -> str:
    """The text itself; raises ``RowError`` if it cannot be tokenised, as what a JSON ``"\\ud800"`` becomes."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RowError(f"character {error.start + 1} of a text, {text[error.start]!r}, is half of a pair") from None
    return text


class ToolCall(NamedTuple):
    """A call that the assistant makes. ``arguments`` is the JSON value, an object in every sane data set."""

    name: str
    arguments: Any
    number: int = 0
    """In the conversation, from 0; known when it is written."""


@dataclass(frozen=True, slots=True)
class Message:
    """What one side says. ``calls`` follow the text and only an assistant has them; a tool message is one result."""

    role: Role
    content: str
    calls: tuple[ToolCall, ...] = ()


class Exchange(NamedTuple):
    """What the model is shown (one user message or the results of its tool calls) and what it answers."""

    prompts: tuple[Message, ...]
    answer: Message


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that alternate between user or tools and assistant, and end with an assistant's answer."""

    messages: tuple[Message, ...]
    system: str = ""
    tools: tuple[dict[str, Any], ...] = field(default=())

    def without_ends(self, end: str) -> Conversation:
        """Without the end token that answers may bring with them: the template writes it, once."""
        if not end or not any(message.content.endswith(end) for message in self.messages):
            return self
        messages = (
            replace(message, content=message.content.removesuffix(end)) if message.role == "assistant" else message
            for message in self.messages
        )
        return replace(self, messages=tuple(messages))

    def exchanges(self) -> Iterator[Exchange]:
        """The conversation as (prompts, answer) pairs; raises ``RowError`` if the roles do not alternate."""
        prompts: list[Message] = []
        for position, message in enumerate(self.messages, start=1):
            if message.role != "assistant":
                if prompts and not message.role == prompts[-1].role == "tool":
                    raise RowError(f"message {position} is a second {message.role} message without an answer between")
                prompts.append(message)
            elif not prompts:
                raise RowError(f"message {position} is the assistant's, but nothing was asked before it")
            else:
                yield Exchange(tuple(prompts), message)
                prompts = []
        if prompts or not self.messages:
            raise RowError("the conversation does not end with an answer of the assistant")


def merge_runs(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Join messages in a row of the same user or assistant into one (tool results stay apart: templates join them)."""
    merged: list[Message] = []
    for message in messages:
        if merged and message.role == merged[-1].role != "tool" and not merged[-1].calls:
            content = "\n".join(part for part in (merged.pop().content, message.content) if part)
            message = Message(message.role, content, message.calls)
        merged.append(message)
    return tuple(merged)
