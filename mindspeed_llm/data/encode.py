"""Conversations to token ids and labels: what is trained on, and what is cut off when a row is too long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from mindspeed_llm.data.conversation import Conversation, RowError, check_text
from mindspeed_llm.data.templates import Style, Template, Turn
from mindspeed_llm.data.tokenise import Tokeniser

IGNORE_INDEX = -100
"""Label of a position that does not count in the loss."""


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """How conversations become labels; the names are the keys of the ``data`` section."""

    cutoff_len: int
    train_on_prompt: bool = False
    mask_history: bool = False
    drop_overlong: bool = False
    llamafactory: bool = False
    style: Style = field(default_factory=Style)


@dataclass(slots=True)
class Document:
    """One sequence: ``labels[i]`` is ``input_ids[i]`` where it is trained on and -100 elsewhere (not shifted)."""

    input_ids: np.ndarray  # [tokens] int32
    labels: np.ndarray  # [tokens] int32
    full_length: int  # before truncation

    @property
    def is_truncated(self) -> bool:
        return len(self.input_ids) < self.full_length


class ConversationEncoder(Protocol):
    """Turns conversations into documents: one per conversation, or several if the template rewrites its history."""

    def __call__(self, conversations: Sequence[Conversation]) -> list[list[Document] | RowError]: ...


class TemplateEncoder:
    """Encodes with one of our templates, token by token what LLaMA-Factory makes of the same template."""

    def __init__(self, template: Template, tokeniser: Tokeniser, options: EncodeOptions) -> None:
        self.template = template
        self.options = options
        self._tokenise = tokeniser

    def __call__(self, conversations: Sequence[Conversation]) -> list[list[Document] | RowError]:
        rendered: list[list[Turn] | RowError] = []
        for conversation in conversations:
            try:
                turns = self.template.turns(conversation, self.options.style)
                for piece in (piece for turn in turns for part in turn[:2] for piece in part):
                    check_text(piece)
                rendered.append(turns)
            except RowError as error:
                rendered.append(error)
        usable = [turns for turns in rendered if not isinstance(turns, RowError)]
        ids = iter(self._tokenise(part for turns in usable for turn in turns for part in turn[:2]))
        return [
            turns
            if isinstance(turns, RowError)
            else [self._document([(next(ids), next(ids)) for _ in turns], [turn.ends_behind for turn in turns])]
            for turns in rendered
        ]

    def _document(self, turns: list[tuple[list[int], list[int]]], ends_behind: Sequence[bool]) -> Document:
        """Join the turns within ``cutoff_len``. The budget goes to the first turns, or to the last if only the last
        answer is trained on (``mask_history``). ``ends_behind`` tells of each turn what ``Turn`` does."""
        options, eos = self.options, self._tokenise.eos
        full_length = sum(len(source) + len(target) for source, target in turns) + ends_behind[-1]
        budget = options.cutoff_len - ends_behind[-1]
        last = len(turns) - 1
        kept: list[tuple[list[int], list[int]]] = []  # (ids, labels) of each turn
        for index, (source, target) in reversed(list(enumerate(turns))) if options.mask_history else enumerate(turns):
            if budget <= 0:
                break
            source_length, target_length = truncated_lengths(len(source), len(target), budget)
            source, target = source[:source_length], target[:target_length]
            budget -= source_length + target_length
            source_labels = source if options.train_on_prompt else [IGNORE_INDEX] * len(source)
            is_end = ends_behind[index - 1] and self._ends_a_trained_answer(index, last)
            if is_end and source and not options.train_on_prompt:
                source_labels = [eos] + [IGNORE_INDEX] * (len(source) - 1)
            is_trained = index == last or not options.mask_history
            kept.append((source + target, source_labels + (target if is_trained else [IGNORE_INDEX] * len(target))))
        if options.mask_history:
            kept.reverse()
        end = [eos] if ends_behind[-1] else []
        input_ids = [token for tokens, _ in kept for token in tokens] + end
        labels = [label for _, labels in kept for label in labels] + end
        return Document(np.array(input_ids, np.int32), np.array(labels, np.int32), full_length)

    def _ends_a_trained_answer(self, index: int, last: int) -> bool:
        """Whether the beginning of turn ``index`` is where the answer before it learns to end (``efficient_eos``)."""
        if not self.options.mask_history:
            return index > 0
        return self.options.llamafactory and index < last  # it teaches the end of answers that are masked


def truncated_lengths(source: int, target: int, budget: int) -> tuple[int, int]:
    """How much of a prompt and its answer is kept in ``budget`` tokens, by LLaMA-Factory's rule: an answer of less than
    half the budget stays whole, else a prompt of less than half stays whole, else both shrink in proportion."""
    if 2 * target < budget:
        kept = target
    elif 2 * source < budget:
        kept = min(target, budget - source)
    else:
        kept = min(target, int(budget * (target / (source + target))))
    return min(source, budget - kept), kept
