"""Rows to token rows: encode chunks of them, in parallel if asked, pack, write, and keep count."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np

from mindspeed_llm.data.conversation import Conversation, RowError, check_text
from mindspeed_llm.data.encode import IGNORE_INDEX, ConversationEncoder, Document, EncodeOptions
from mindspeed_llm.data.formats import missing_column, read_conversation
from mindspeed_llm.data.packing import cut_stream, greedy_knapsack
from mindspeed_llm.data.report import Problem, Tally
from mindspeed_llm.data.specs import DatasetSpec
from mindspeed_llm.data.templates import Content, Piece
from mindspeed_llm.data.tokenise import Tokeniser

logger = logging.getLogger(__name__)


class Item(NamedTuple):
    """A raw row, or the reason why it could not even be read."""

    spec: DatasetSpec
    where: str
    row: dict[str, Any] | RowError


@dataclass
class Chunk:
    """A number of encoded rows, in the layout of ``RowWriter.write``."""

    input_ids: np.ndarray
    labels: np.ndarray | None
    lengths: list[int]
    row_sizes: list[int]
    tally: Tally = field(default_factory=Tally)


class ChunkEncoder(Protocol):
    """Encodes rows that belong together; what it makes of them does not depend on the process it runs in."""

    def __call__(self, items: Sequence[Item]) -> Chunk: ...


@dataclass
class ConversationChunks:
    """Supervised fine-tuning: rows become conversations, then documents, packed within the chunk up to ``capacity``."""

    encode: ConversationEncoder
    options: EncodeOptions
    capacity: int | None = None
    end: str = ""
    """The text of the token that ends answers; one that is part of an answer is not written twice."""

    def __call__(self, items: Sequence[Item]) -> Chunk:
        tally = Tally()
        documents = [document for document in self._documents(items, tally) if self._keeps(document, tally)]
        rows = [[index] for index in range(len(documents))]
        if self.capacity:
            rows = greedy_knapsack([len(document.input_ids) for document in documents], self.capacity)
        ordered = [documents[index] for row in rows for index in row]
        return Chunk(
            input_ids=_join([document.input_ids for document in ordered]),
            labels=_join([document.labels for document in ordered]),
            lengths=[len(document.input_ids) for document in ordered],
            row_sizes=[len(row) for row in rows],
            tally=tally,
        )

    def _documents(self, items: Sequence[Item], tally: Tally) -> list[Document]:
        places: list[str] = []
        conversations: list[Conversation] = []
        for spec, where, row in items:
            try:
                if isinstance(row, RowError):
                    raise row
                conversation = read_conversation(row, spec, llamafactory=self.options.llamafactory)
                conversations.append(conversation.without_ends(self.end))
                places.append(where)
            except RowError as error:
                tally.problems.append(Problem(where, str(error)))
        documents: list[Document] = []
        for where, encoded in zip(places, self.encode(conversations), strict=True):
            if isinstance(encoded, RowError):
                tally.problems.append(Problem(where, str(encoded)))
            else:
                tally.split += len(encoded) > 1
                documents += encoded
        return documents

    def _keeps(self, document: Document, tally: Tally) -> bool:
        if document.is_truncated and self.options.drop_overlong:
            tally.overlong += 1
            return False
        if not self.options.llamafactory and not (document.labels[1:] != IGNORE_INDEX).any():
            tally.unlabelled += 1
            return False
        tally.truncated += document.is_truncated
        return True


@dataclass
class TextChunks:
    """Pretraining: every text and the eos token after it, a document each; everything is trained on."""

    tokenise: Tokeniser
    prefix: Sequence[Piece]
    suffix: Sequence[Piece]
    cutoff_len: int
    begin: str = ""
    end: str = ""
    """The texts of the tokens around a document; those that it brings with it are not written twice."""
    llamafactory: bool = False

    def __call__(self, items: Sequence[Item]) -> Chunk:
        tally = Tally()
        texts = []
        for spec, where, row in items:
            try:
                texts.append(self._text(spec, row))
            except RowError as error:
                tally.problems.append(Problem(where, str(error)))
        documents = self.tokenise([*self.prefix, Content(text), *self.suffix] for text in texts)
        input_ids = _join([np.array(document, np.int32) for document in documents])
        lengths = [len(document) for document in documents]
        if self.llamafactory:  # a chunk is cut by itself, its rest lost, and documents are not told apart
            lengths = [sum(row) for row in cut_stream([sum(lengths)], self.cutoff_len, drop_rest=True)]
            input_ids = input_ids[: sum(lengths)]
        return Chunk(input_ids, None, lengths, [1] * len(lengths), tally)

    def _text(self, spec: DatasetSpec, row: dict[str, Any] | RowError) -> str:
        text = read_text(spec, row)
        if not text.strip() and not self.llamafactory:
            raise RowError(f"column {spec.column('prompt')!r} is blank")
        return text.removeprefix(self.begin).removesuffix(self.end)


def read_text(spec: DatasetSpec, row: dict[str, Any] | RowError) -> str:
    """The text of a row; raises ``RowError`` where there is none."""
    if isinstance(row, RowError):
        raise row
    column = spec.column("prompt") or "text"
    if column not in row:
        raise missing_column(column, row)
    text = row[column]
    if not isinstance(text, str):
        raise RowError(f"column {column!r} is not text but {type(text).__name__}")
    return check_text(text)


def encode_chunks(
    encoder: ChunkEncoder, chunks: Iterable[Sequence[Item]], *, workers: int, total: int
) -> Iterator[Chunk]:
    """The encoded chunks, in order; in ``workers`` processes if there are more than one."""
    last_report, done = time.monotonic(), 0
    for chunk, size in _in_order(encoder, chunks, workers):
        yield chunk
        done += size
        if time.monotonic() - last_report > 10:
            last_report = time.monotonic()
            logger.info("data: %d of %d rows prepared", done, total)


def _in_order(encoder: ChunkEncoder, chunks: Iterable[Sequence[Item]], workers: int) -> Iterator[tuple[Chunk, int]]:
    chunks, start = iter(chunks), time.monotonic()
    yield from _until(lambda: workers > 1 and time.monotonic() - start > _ALONE, encoder, chunks)
    if (first := next(chunks, None)) is None:
        return
    # A fork server: a process of many threads (Rust's, the process group's) must not be forked itself.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(workers, context, initializer=_initialise, initargs=(encoder,)) as pool:
        started = [pool.submit(bool) for _ in range(workers)]
        chunks = chain([first], chunks)
        yield from _until(lambda: all(one.done() for one in started), encoder, chunks)
        pending: deque[tuple[Future[Chunk], int]] = deque()
        for items in chunks:
            pending.append((pool.submit(_encode_here, list(items)), len(items)))
            if len(pending) > 2 * workers:
                future, size = pending.popleft()
                yield future.result(), size
        for future, size in pending:
            yield future.result(), size


def _until(
    is_enough: Callable[[], bool], encoder: ChunkEncoder, chunks: Iterator[Sequence[Item]]
) -> Iterator[tuple[Chunk, int]]:
    """Encode in this process."""
    while not is_enough() and (items := next(chunks, None)) is not None:
        yield encoder(items), len(items)


_ALONE = 1.0
"""Seconds after which other processes are started. That takes some seconds, in which most data sets are prepared."""

_encoder_here: Callable[[Sequence[Item]], Chunk] | None = None  # in a worker: pickled once, not with every chunk


def _initialise(encoder: ChunkEncoder) -> None:
    global _encoder_here
    _encoder_here = encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes share out the work, so threads would be in the way


def _encode_here(items: Sequence[Item]) -> Chunk:
    assert _encoder_here is not None
    return _encoder_here(items)


def _join(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
