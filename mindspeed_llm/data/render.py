"""The first sample as the model sees it, to look at before a run."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from mindspeed_llm.data.encode import IGNORE_INDEX
from mindspeed_llm.data.store import Row


def render_sample(row: Row, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int = 1000) -> str:
    """A row, usually the first one, as text with what is trained on in ``[[ ]]``, then its ids and labels.

    A packed row shows its documents one below the other.
    """
    lines, start = [], 0
    for length in row["lengths"]:
        ids, labels = (row[key][start : start + int(length)].tolist() for key in ("input_ids", "labels"))
        start += int(length)
        lines.append(_bracketed(ids[:max_tokens], labels[:max_tokens], tokenizer))
    cut = " (cut for display)" if len(row["input_ids"]) > max_tokens else ""
    return "\n".join(
        [
            f"first sample, {len(row['input_ids'])} tokens{cut}, trained on what is in [[ ]]:",
            "\n--- next document ---\n".join(lines),
            f"input_ids: {row['input_ids'][:max_tokens].tolist()}",
            f"labels:    {row['labels'][:max_tokens].tolist()}",
        ]
    )


def _bracketed(ids: list[int], labels: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    spans: list[tuple[bool, list[int]]] = []
    for token, label in zip(ids, labels, strict=True):
        is_trained = label != IGNORE_INDEX
        if not spans or spans[-1][0] != is_trained:
            spans.append((is_trained, []))
        spans[-1][1].append(token)
    texts = ((trained, tokenizer.decode(tokens, skip_special_tokens=False)) for trained, tokens in spans)
    return "".join(f"[[{text}]]" if trained else str(text) for trained, text in texts)
