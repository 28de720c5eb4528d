"""A chat template: a few lines that say what a model family writes around every message."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from functools import lru_cache
from itertools import count, groupby
from typing import NamedTuple

from mindspeed_llm.data.conversation import Content, Conversation, Exchange, Message, RowError, ToolCall
from mindspeed_llm.data.tool_format import Written, pieces_of
from mindspeed_llm.data.tools import ToolFormat, get_tool_format

_TOKENS = re.compile(r"\{(bos|eos)\}")


class SpecialToken(str):
    """``bos`` or ``eos``: the tokenizer's own token, whatever its text."""


Piece = str | Content | SpecialToken  # pieces are tokenised one by one and their ids joined


class Turn(NamedTuple):
    """One exchange as text."""

    source: list[Piece]
    """What the model is shown."""
    target: list[Piece]
    """What it has to write."""
    ends_behind: bool
    """Whether the token that ends the answer is the one behind it: no part of ``target`` (``efficient_eos``)."""


@dataclass(frozen=True, kw_only=True)
class Thinking:
    """The words around a thought, and the block that stands for "no thought"."""

    opening: str
    closing: str
    nothing: str | None = None
    """The block, if it is not an empty thought. The model always writes it itself: it is no part of a prompt."""

    @property
    def empty(self) -> str:
        return self.opening + self.closing if self.nothing is None else self.nothing

    def present(self, text: str) -> bool:
        return self.opening.strip() in text or self.closing.strip() in text

    def remove(self, text: str) -> str:
        pattern = f"{re.escape(self.opening.strip())}.*?{re.escape(self.closing.strip())}"
        return re.sub(pattern, "", text, flags=re.DOTALL).lstrip("\n")

    def unmarked(self, text: str) -> str:
        """Without the words around thoughts."""
        return text.replace(self.opening, "").replace(self.closing, "")


@dataclass(frozen=True, kw_only=True)
class Style:
    """What a run asks of a template: the options of the ``data`` section that change the text."""

    default_system: str | None = None
    enable_thinking: bool | None = True
    forget_thoughts: bool = False
    """Drop the thoughts of all answers but the last, as chat applications do (goes with ``mask_history``)."""
    tool_format: str | None = None
    isolate_content: bool = False
    """Keep the data's text in pieces of its own (for ``split_special_tokens``)."""
    today: date = field(default_factory=date.today)
    llamafactory: bool = False
    """Join parallel tool results in the way of LLaMA-Factory, the Qwen way whatever the family."""


@dataclass(frozen=True, kw_only=True)
class Template:
    """What is written around messages. In every text ``{content}`` stands for the message, ``{bos}`` and ``{eos}``
    for the tokenizer's tokens; everything else is literal.

    The loss counts on what ``assistant`` and ``function`` write; ``user`` and ``observation`` therefore end with the
    header of the answer.
    """

    name: str
    user: str
    """A user message, up to where the answer begins."""
    assistant: str = "{content}{eos}"
    """An answer, with the token that ends it."""
    system: str = "{content}"
    """The system prompt and the description of tools."""
    instructions: str = "{content}"
    """The system prompt by itself."""
    observation: str | None = None
    """The result of a tool call; null: as a user message."""
    next_observation: str = "\n"
    """What stands between the results of parallel calls."""
    function: str | None = None
    """An answer that calls tools; null: as any answer."""
    prefix: str = ""
    """What a conversation begins with. ``{date}`` is the day, ``{tools}`` what the tool format announces."""
    default_system: str = ""
    """System prompt of conversations that have none."""
    system_in_user: bool = False
    """The system prompt is written inside the first user message."""
    tools: str = "default"
    """Name of the tool format (`mindspeed_llm.data.tools`)."""
    thinking: Thinking | None = None
    """How thoughts are marked, for reasoning models."""
    efficient_eos: bool = False
    """Answers have no end token of their own: the beginning of the next turn is where the model learns to end."""
    end_of_history: str = ""
    """With ``efficient_eos``: what stands in that place behind an answer that is not the last."""
    calls_end: bool = False
    """With ``efficient_eos``: ``function`` has an end token all the same."""
    eos: str | None = None
    """The token that ends an answer, if it is not the tokenizer's eos token."""
    llamafactory: Template | None = None
    """How LLaMA-Factory writes it, where that is not the family's way (``training.parity: llamafactory``)."""

    def turns(self, conversation: Conversation, style: Style) -> list[Turn]:
        """The pieces of text of every exchange. Raises ``RowError`` for a conversation that cannot be written."""
        if style.llamafactory and self.llamafactory:
            return self.llamafactory.turns(conversation, style)
        tools = get_tool_format(style.tool_format or self.tools)
        exchanges = list(conversation.exchanges())
        system = self._system(conversation, tools, style)
        numbers = count()
        turns: list[Turn] = []
        calls: tuple[ToolCall, ...] = ()  # of the answer before
        for index, exchange in enumerate(exchanges):
            source = self._prompt(exchange, calls, tools, system if index == 0 else [], style)
            answer = exchange.answer
            calls = tuple(call._replace(number=next(numbers)) for call in answer.calls)
            if calls:
                answer = replace(answer, calls=calls)
            if index == 0:
                source = self._prefix(conversation, tools, style) + source
            elif self.end_of_history and turns[-1].ends_behind:
                source = [self.end_of_history, *source]
            is_history = style.forget_thoughts and index < len(exchanges) - 1
            block, target = self._answer(answer, tools, style, is_history)
            if block and (style.enable_thinking or (self.thinking and self.thinking.nothing)):
                target = [block, *target]  # the model has to say itself that it does not think
            elif block:
                source = [*source, block]  # the prompt says it
            turns.append(Turn(source, target, self.efficient_eos and not (calls and self.calls_end)))
        return turns

    @property
    def is_dated(self) -> bool:
        """Whether it tells the model the date."""
        return "{date}" in self.prefix

    def _prefix(self, conversation: Conversation, tools: ToolFormat, style: Style) -> list[Piece]:
        slot = self.prefix.replace("{date}", f"{style.today:%Y-%m-%d}").replace("{tools}", "{content}")
        with _schemas():
            return self._fill(slot, tools.announce(conversation.tools) if conversation.tools else "", style)

    def _system(self, conversation: Conversation, tools: ToolFormat, style: Style) -> list[str]:
        """The system prompt with the description of the tools behind it."""
        system = conversation.system or (self.default_system if style.default_system is None else style.default_system)
        system = self.instructions.replace("{content}", system, 1) if system else ""
        if not conversation.tools:
            return pieces_of(system)
        with _schemas():
            described = tools.describe(conversation.tools, style.today)
        if isinstance(described, list):
            return pieces_of(system) + described
        return pieces_of(system + described if system or style.llamafactory else described.lstrip("\n"))

    def _prompt(
        self, exchange: Exchange, calls: Sequence[ToolCall], tools: ToolFormat, system: list[str], style: Style
    ) -> list[Piece]:
        """What is shown before an answer; ``calls`` are those whose results it may be."""
        slot, texts = self.user, [message.content for message in exchange.prompts]
        contents = [pieces_of(text) for text in texts]
        if exchange.prompts[0].role == "tool":
            slot = self.user if self.observation is None else self.observation
            if tools.result:
                if len(calls) != len(contents):
                    raise RowError(f"there are {len(contents)} results of {len(calls)} tool calls")
                contents = [pieces_of(tools.result(*result)) for result in zip(calls, texts, strict=True)]
        separator = _QWEN_SEPARATOR if style.llamafactory else self.next_observation
        content = contents[0] + [piece for others in contents[1:] for piece in (separator, *others)]
        if not system:
            return self._fill(slot, content, style)
        if self.system_in_user:
            before, _, after = self.system.partition("{content}")
            return self._fill(slot, [before, *system, after, *content], style)
        return self._fill(self.system, system, style) + self._fill(slot, content, style)

    def _answer(self, answer: Message, tools: ToolFormat, style: Style, is_history: bool) -> tuple[str, list[Piece]]:
        """The empty thought that the answer needs before it, if any, and the answer."""
        content, block, thinking = answer.content, "", self.thinking
        if thinking and (style.enable_thinking is False or is_history):
            content = thinking.remove(content)
        if thinking and thinking.nothing and answer.calls:  # the text beside a call is a thought
            content = thinking.unmarked(content)
        elif thinking and not thinking.present(content) and (thinking.nothing or not is_history):
            block = thinking.empty
        if answer.calls:
            call = (style.llamafactory and tools.llamafactory_call) or tools.call
            beside = tools.beside(content) if content else ""
            try:
                written = pieces_of(beside) + pieces_of(call(answer.calls))
            except (TypeError, RecursionError) as error:  # a value of a columnar file, such as a date
                raise RowError(f"its tool calls cannot be written as JSON: {error}") from None
            return block, self._fill(self.function or self.assistant, written, style)
        return block, self._fill(self.assistant, content, style)

    @staticmethod
    def _fill(slot: str, content: Written, style: Style) -> list[Piece]:
        """The slot around the content, cut into pieces at the special tokens."""
        pieces: list[Piece] = []
        for index, part in enumerate(_cut(slot)):
            if index % 2:
                pieces.append(SpecialToken(part))
            else:
                before, found, after = part.partition("{content}")
                pieces += [before, *pieces_of(content), after] if found else [before]
        return list(_joined(pieces, style.isolate_content))


def _joined(pieces: Iterable[Piece], isolate_content: bool) -> Iterator[Piece]:
    """Neighbours of one kind as one piece."""
    whole = pieces if isolate_content else (str(piece) if type(piece) is Content else piece for piece in pieces)
    for kind, run in groupby((piece for piece in whole if piece), type):
        if kind is SpecialToken:
            yield from run
        else:
            yield kind("".join(run))


@contextmanager
def _schemas() -> Iterator[None]:
    """What is written of tools in here spoils its row if they are no schemas."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise RowError(f"its tools do not have the form of a JSON schema ({error!r})") from None


@lru_cache
def _cut(slot: str) -> list[str]:
    """At the special tokens, whose names are every second part."""
    return _TOKENS.split(slot)


_QWEN_SEPARATOR = "\n</tool_response>\n<tool_response>\n"
