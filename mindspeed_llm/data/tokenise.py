"""Pieces of text to token ids, many rows at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

from mindspeed_llm.data.templates import Content, Piece, SpecialToken
from mindspeed_llm.errors import DataError


class Tokeniser:
    """Token ids of sequences of pieces; no special tokens are added, and each piece is tokenised by itself.

    Text that looks like a special token becomes that token, also in the data's own text unless
    ``split_special_tokens``: then a ``Content`` piece never contains one.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, eos: str | None = None, split_special_tokens: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._split_special_tokens = split_special_tokens
        eos_id = tokenizer.eos_token_id if eos is None else tokenizer.get_vocab().get(eos)
        if eos_id is None:
            missing = f"token {eos!r}, which ends answers in this data.template" if eos else "eos token"
            raise DataError(f"the tokenizer has no {missing}.")
        self.eos = int(eos_id)

    def __call__(self, sequences: Iterable[Sequence[Piece]]) -> list[list[int]]:
        """The token ids of every sequence of pieces."""
        sequences = list(sequences)
        pieces = {(type(piece), piece) for pieces in sequences for piece in pieces}  # most are said again and again
        ids = self._ids([piece for kind, piece in pieces if kind is str], split=False)
        content = self._ids([piece for kind, piece in pieces if kind is Content], split=self._split_special_tokens)
        result = []
        for sequence in sequences:
            tokens: list[int] = []
            for piece in sequence:
                if isinstance(piece, SpecialToken):
                    tokens += self._special(piece)
                else:
                    tokens += (content if isinstance(piece, Content) else ids)[piece]
            result.append(tokens)
        return result

    def _ids(self, texts: Sequence[str], *, split: bool) -> dict[str, list[int]]:
        if not texts:
            return {}
        options = {"split_special_tokens": True} if split else {}
        encoded = self._tokenizer(
            list(map(str, texts)),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
            **options,
        )
        return dict(zip(texts, encoded["input_ids"], strict=True))

    def _special(self, name: SpecialToken) -> list[int]:
        if name == "bos":  # many tokenizers have none, and then the model was trained without
            return [] if self._tokenizer.bos_token_id is None else [self._tokenizer.bos_token_id]
        return [self.eos]
