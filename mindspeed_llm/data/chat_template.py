"""``template: null``: conversations written by the tokenizer's own chat template, answers found by prefix rendering.

The model is trained on exactly what it would have to generate, that is on what the template writes for an answer behind
the prompt that it gives for the messages before it ::

    render(messages[:i], add_generation_prompt=True)    <user>Hi<end><assistant>
    render(messages[:i + 1])                            <user>Hi<end><assistant>Hello!<end>
                                                                                `-trained-'

Some templates rewrite what was said before: Qwen3's and DeepSeek-R1's drop the thoughts of earlier answers. A later
rendering then does not begin with the earlier one, and the conversation is split there: each part is a row of its own
that shows the history as the model will see it, and no thought is lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from mindspeed_llm.data.conversation import Conversation, Message, RowError, check_text
from mindspeed_llm.data.encode import IGNORE_INDEX, Document, EncodeOptions, truncated_lengths
from mindspeed_llm.data.templates import THINK, Style
from mindspeed_llm.errors import DataError


@dataclass(slots=True)
class _Rendering:
    """A text and the character spans in it that are trained on."""

    text: str
    answers: list[tuple[int, int]]
    has_masked_history: bool


class ChatTemplateEncoder:
    """Encodes with the tokenizer's chat template. A conversation may become several rows (see the module)."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, options: EncodeOptions, *, split_special_tokens: bool = False
    ) -> None:
        if not tokenizer.chat_template:
            raise DataError(
                "the tokenizer has no chat template. Set data.template to the model's family (chatml, qwen3, llama3, "
                "...), or to default for a model that was never trained on conversations."
            )
        if split_special_tokens:
            raise DataError(
                "model.split_special_tokens needs data.template: the tokenizer's own template mixes its text with the "
                "data's."
            )
        if not tokenizer.is_fast:
            raise DataError(
                "the tokenizer is not a fast one, so answers cannot be found in what its own chat template writes. Set "
                "data.template."
            )
        self._tokenizer = tokenizer
        self.options = options

    def __call__(self, conversations: Sequence[Conversation]) -> list[list[Document] | RowError]:
        rendered: list[list[_Rendering] | RowError] = []
        for conversation in conversations:
            try:
                rendered.append(self._render_parts(conversation))
            except RowError as error:
                rendered.append(error)
            except Exception as error:  # whatever a template of the model's makes of data it was not written for
                rendered.append(RowError(f"the tokenizer's chat template refuses it: {error}"))
        renderings = [part for parts in rendered if not isinstance(parts, RowError) for part in parts]
        documents = iter(self._documents(renderings))
        result: list[list[Document] | RowError] = []
        for parts in rendered:
            result.append(parts if isinstance(parts, RowError) else [next(documents) for _ in parts])
        return result

    def _render_parts(self, conversation: Conversation) -> list[_Rendering]:
        messages = _chat_messages(conversation, self.options.style)
        tools = [dict(tool) for tool in conversation.tools] or None
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        list(conversation.exchanges())  # checks the order of roles
        parts: list[_Rendering] = []
        for answer in answers[-1:] if self.options.mask_history else answers:
            text = check_text(self._render(messages[: answer + 1], tools))
            span = (self._answer_start(messages[:answer], messages[answer], tools, text), len(text))
            if parts and text.startswith(parts[-1].text):
                parts[-1].text = text
                parts[-1].answers.append(span)
            else:
                parts.append(_Rendering(text, [span], has_masked_history=answer != answers[0]))
        return parts

    def _answer_start(
        self, before: list[dict[str, Any]], answer: dict[str, Any], tools: list[dict[str, Any]] | None, text: str
    ) -> int:
        """Where the answer begins in ``text``: after what it has in common with the generation prompt.

        They may differ before the prompt's end, as where the prompt already opens a thought that the answer lacks.
        """
        options = {"add_generation_prompt": True}
        if self.options.style.enable_thinking is None:  # each row as it is
            options["enable_thinking"] = THINK.present(answer["content"])
        prompt = self._render(before, tools, **options)
        start = _common_prefix(prompt, text)
        fits = start == len(prompt) or start >= len(self._render(before, tools).rstrip())
        if not fits or start == len(text):
            raise RowError("the tokenizer's chat template gives an answer no place after its prompt")
        return start

    def _render(self, messages: list[dict[str, Any]], tools: list[Any] | None, **options: Any) -> str:
        thinking = self.options.style.enable_thinking
        if thinking is not None:
            options["enable_thinking"] = thinking
        text = self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
        return str(text)

    def _documents(self, renderings: Sequence[_Rendering]) -> list[Document]:
        if not renderings:
            return []
        encoded = self._tokenizer(
            [rendering.text for rendering in renderings],
            add_special_tokens=False,  # the template writes bos itself
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        return [
            self._document(np.array(ids, np.int32), np.array(offsets, np.int64).reshape(-1, 2), rendering)
            for ids, offsets, rendering in zip(encoded["input_ids"], encoded["offset_mapping"], renderings, strict=True)
        ]

    def _document(self, ids: np.ndarray, offsets: np.ndarray, rendering: _Rendering) -> Document:
        trained = np.zeros(len(ids), bool)
        for start, end in rendering.answers:
            span = (offsets[:, 0] >= start) & (offsets[:, 1] <= end)
            trained |= span & ~self._after_last_eos(ids, span)
        if self.options.train_on_prompt:
            trained[:] = True
        keep = self._kept(trained, rendering.has_masked_history)
        return Document(ids[keep], np.where(trained, ids, IGNORE_INDEX).astype(np.int32)[keep], len(ids))

    def _after_last_eos(self, ids: np.ndarray, span: np.ndarray) -> np.ndarray:
        """Positions behind the answer's last eos: a newline that templates write there is never generated."""
        ends = np.flatnonzero(span & (ids == self._tokenizer.eos_token_id))
        return np.arange(len(ids)) > (ends[-1] if len(ends) else len(ids))

    def _kept(self, trained: np.ndarray, has_masked_history: bool) -> np.ndarray:
        """Indices kept within ``cutoff_len``: turn by turn as ``TemplateEncoder`` shares out the budget. A prompt with
        history in it loses its beginning, any other its end."""
        budget = self.options.cutoff_len
        if len(trained) <= budget:
            return np.arange(len(trained))
        begins = np.flatnonzero(np.diff(trained.astype(np.int8), prepend=1) < 0)  # a turn begins where training stops
        turns = np.split(np.arange(len(trained)), begins[1:] if len(begins) and begins[0] == 0 else begins)
        kept = []
        for turn in turns:
            source, target = turn[~trained[turn]], turn[trained[turn]]
            if budget <= 0:
                break
            source_length, target_length = truncated_lengths(len(source), len(target), budget)
            kept += [source[len(source) - source_length :] if has_masked_history else source[:source_length]]
            kept += [target[:target_length]]
            budget -= source_length + target_length
        return np.sort(np.concatenate(kept))


def _common_prefix(first: str, second: str) -> int:
    """How many characters the two begin with in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _chat_messages(conversation: Conversation, style: Style) -> list[dict[str, Any]]:
    """The messages as transformers' chat templates expect them."""
    system = conversation.system or style.default_system
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    return messages + [_chat_message(message, style) for message in conversation.messages]


def _chat_message(message: Message, style: Style) -> dict[str, Any]:
    drop_thought = message.role == "assistant" and style.enable_thinking is False
    content = THINK.remove(message.content) if drop_thought else message.content
    chat: dict[str, Any] = {"role": message.role, "content": content}
    if message.calls:
        chat["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": _arguments(call.arguments)}}
            for call in message.calls
        ]
    return chat


def _arguments(arguments: Any) -> Any:
    return arguments if isinstance(arguments, Mapping) else json.dumps(arguments, ensure_ascii=False)
