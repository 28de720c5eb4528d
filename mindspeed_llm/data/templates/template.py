"""A chat template: a few lines that say what a model family writes around every message."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import date

from mindspeed_llm.data.conversation import Conversation, Exchange, Message, RowError
from mindspeed_llm.data.tools import ToolFormat, get_tool_format

_TOKENS = re.compile(r"\{(bos|eos)\}")


class Content(str):
    """Text that came from the data, kept apart from the template's own so that it can be tokenised differently."""


class SpecialToken(str):
    """``bos`` or ``eos``: the tokenizer's own token, whatever its text."""


Piece = str | Content | SpecialToken  # pieces are tokenised one by one and their ids joined
Turn = tuple[list[Piece], list[Piece]]  # what the model is shown, what it has to write


@dataclass(frozen=True, kw_only=True)
class Thinking:
    """The words around a thought, and the block that stands for "no thought"."""

    opening: str
    closing: str

    @property
    def empty(self) -> str:
        return self.opening + self.closing

    def present(self, text: str) -> bool:
        return self.opening.strip() in text or self.closing.strip() in text

    def remove(self, text: str) -> str:
        pattern = f"{re.escape(self.opening.strip())}.*?{re.escape(self.closing.strip())}"
        return re.sub(pattern, "", text, flags=re.DOTALL).lstrip("\n")


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
    observation: str | None = None
    """The result of a tool call; null: as a user message."""
    next_observation: str = "\n"
    """What stands between the results of parallel calls."""
    function: str | None = None
    """An answer that calls tools; null: as any answer."""
    prefix: str = ""
    """What a conversation begins with."""
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
    eos: str | None = None
    """The token that ends an answer, if it is not the tokenizer's eos token."""

    def turns(self, conversation: Conversation, style: Style) -> list[Turn]:
        """The pieces of text of every exchange. Raises ``RowError`` for a conversation that cannot be written."""
        tools = get_tool_format(style.tool_format or self.tools)
        exchanges = list(conversation.exchanges())
        system = conversation.system or (self.default_system if style.default_system is None else style.default_system)
        if conversation.tools:
            try:
                system += tools.describe(conversation.tools, style.today)
            except (AttributeError, KeyError, TypeError) as error:
                raise RowError(f"its tools do not have the form of a JSON schema ({error!r})") from None
        turns = []
        for index, exchange in enumerate(exchanges):
            source = self._prompt(exchange, system if index == 0 else "", style)
            if index == 0:
                source = self._fill(self.prefix, "", style) + source
            is_history = style.forget_thoughts and index < len(exchanges) - 1
            block, target = self._answer(exchange.answer, tools, style, is_history)
            if block and style.enable_thinking:
                target = [block, *target]  # the model has to say itself that it does not think
            elif block:
                source = [*source, block]  # the prompt says it
            turns.append((source, target))
        return turns

    def _prompt(self, exchange: Exchange, system: str, style: Style) -> list[Piece]:
        first = exchange.prompts[0]
        slot = self.user if first.role == "user" or self.observation is None else self.observation
        separator = _QWEN_SEPARATOR if style.llamafactory else self.next_observation
        content = separator.join(message.content for message in exchange.prompts)
        if not system:
            return self._fill(slot, content, style)
        if self.system_in_user:
            return self._fill(slot, self.system.replace("{content}", system, 1) + content, style)
        return self._fill(self.system, system, style) + self._fill(slot, content, style)

    def _answer(self, answer: Message, tools: ToolFormat, style: Style, is_history: bool) -> tuple[str, list[Piece]]:
        """The empty thought that the answer needs before it, if any, and the answer."""
        content, block = answer.content, ""
        if self.thinking:
            if style.enable_thinking is False or is_history:
                content = self.thinking.remove(content)
            if not is_history and not self.thinking.present(content):
                block = self.thinking.empty
        if answer.calls:
            if content and not content.endswith("\n"):
                content += "\n"
            call = (style.llamafactory and tools.llamafactory_call) or tools.call
            return block, self._fill(self.function or self.assistant, content + call(answer.calls), style)
        return block, self._fill(self.assistant, content, style)

    @staticmethod
    def _fill(slot: str, content: str, style: Style) -> list[Piece]:
        """The slot around the content, cut into pieces at the special tokens."""
        pieces: list[Piece] = []
        for index, part in enumerate(_TOKENS.split(slot)):
            if index % 2:
                pieces.append(SpecialToken(part))
            elif style.isolate_content and "{content}" in part:
                before, after = part.split("{content}", 1)
                pieces += [before, Content(content), after]
            else:
                pieces.append(part.replace("{content}", content, 1))
        return [piece for piece in pieces if piece]


_QWEN_SEPARATOR = "\n</tool_response>\n<tool_response>\n"
