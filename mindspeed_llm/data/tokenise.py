"""Pieces of text to token ids, many rows at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

from mindspeed_llm.data.templates import Content, Piece, SpecialToken
from mindspeed_llm.errors import DataError

_IDS_ONLY: dict[str, bool] = {
    "add_special_tokens": False,
    "return_attention_mask": False,
    "return_token_type_ids": False,
    "verbose": False,
}
_PROBE = "Hello, wörld!\n\n  x = 1234;\t你好 😀 "


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
        self._is_plain = _calls_its_backend_only(tokenizer)

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
        strings = list(map(str, texts))
        if self._is_plain:
            return dict(zip(texts, self._backend_ids(strings, split), strict=True))
        options = {"split_special_tokens": True} if split else {}
        encoded = self._tokenizer(strings, **_IDS_ONLY, **options)
        return dict(zip(texts, encoded["input_ids"], strict=True))

    def _backend_ids(self, texts: list[str], split: bool) -> list[list[int]]:
        """The same ids in half the time: transformers has the backend find out where in the text every token is."""
        backend = self._tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = split or self._tokenizer.split_special_tokens
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _special(self, name: SpecialToken) -> list[int]:
        if name == "bos":  # many tokenizers have none, and then the model was trained without
            return [] if self._tokenizer.bos_token_id is None else [self._tokenizer.bos_token_id]
        return [self.eos]


def _calls_its_backend_only(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the class of a fast tokenizer does nothing of its own to a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "encode_batch_fast"):
        return False
    probe = _PROBE + " ".join(map(str, tokenizer.all_special_tokens))
    expected = tokenizer([probe], **_IDS_ONLY)["input_ids"][0]
    return bool(backend.encode_batch_fast([probe], add_special_tokens=False)[0].ids == expected)
