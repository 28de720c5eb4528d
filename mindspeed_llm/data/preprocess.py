"""``python -m mindspeed_llm.data.preprocess``: texts to the ``.bin`` and ``.idx`` files that Megatron reads.

Documents are tokenised once for many runs, in parallel. A command that was stopped goes on when it is given again.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindspeed_llm.data.cache import code_fingerprint, fingerprint, tokenizer_fingerprint
from mindspeed_llm.data.conversation import RowError
from mindspeed_llm.data.megatron.writer import IndexedWriter, token_type
from mindspeed_llm.data.prepare import Chunk, Item, encode_chunks, read_text
from mindspeed_llm.data.report import Problem, Report, Tally
from mindspeed_llm.data.selection import Selection
from mindspeed_llm.data.sources import data_files
from mindspeed_llm.data.specs import DatasetSpec
from mindspeed_llm.data.templates import Content, SpecialToken
from mindspeed_llm.data.tokenise import Tokeniser
from mindspeed_llm.errors import DataError, UserError


@dataclass
class DocumentChunks:
    """Encodes texts as Megatron's ``preprocess_data.py`` does: an empty one is a document without tokens."""

    tokenise: Tokeniser
    begins: bool
    append_eod: bool

    def __call__(self, items: Sequence[Item]) -> Chunk:
        tally, texts = Tally(), []
        for spec, where, row in items:
            try:
                texts.append(read_text(spec, row))
            except RowError as error:
                tally.problems.append(Problem(where, str(error)))
        begin = [SpecialToken("bos")] if self.begins else []
        end = [SpecialToken("eos")] if self.append_eod else []
        documents = self.tokenise([*begin, Content(text), *end] if text else [] for text in texts)
        lengths = [len(document) for document in documents]
        tokens = np.array([token for document in documents for token in document], np.int32)
        return Chunk(
            tokens, None, [length for length in lengths if length], [int(length > 0) for length in lengths], tally
        )


def preprocess(
    inputs: Sequence[Path],
    prefix: Path,
    tokenizer_folder: str,
    *,
    column: str = "text",
    append_eod: bool = True,
    workers: int = 1,
    chunk_size: int = 1000,
) -> Report:
    """Write ``prefix.bin`` and ``prefix.idx``. Raises ``DataError`` when no text is left."""
    from transformers import AutoTokenizer  # takes seconds to import, which --help need not wait for

    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    except (OSError, ValueError) as error:
        raise DataError(f"--tokenizer {tokenizer_folder}: {error}") from None
    for path in inputs:
        if not path.exists():
            raise DataError(f"--input: there is no {path}")
    specs = [DatasetSpec(name=path.name, path=path, columns={"prompt": column}) for path in inputs]
    selection = Selection(specs, max_samples=None, seed=0)
    if not len(selection):
        raise DataError(f"--input: {', '.join(map(str, inputs))}: the files are empty")
    report = Report(prefix.name, len(selection))
    files = [(str(file.resolve()), os.stat(file).st_size, os.stat(file).st_mtime_ns)
             for spec in specs for file in data_files(spec.path)]  # fmt: skip
    identity = [files, column, append_eod, chunk_size, tokenizer_fingerprint(tokenizer), code_fingerprint()]
    writer = IndexedWriter(prefix, token_type(len(tokenizer)), fingerprint(identity))
    if writer.chunks:
        logging.getLogger(__name__).info("going on after %d rows", writer.chunks * chunk_size)
    selection.rows = selection.rows[writer.chunks * chunk_size :]
    encoder = DocumentChunks(Tokeniser(tokenizer), bool(getattr(tokenizer, "add_bos_token", False)), append_eod)
    chunks = selection.chunks(chunk_size)
    for chunk in encode_chunks(encoder, chunks, workers=workers, total=len(selection)):
        writer.write(chunk.input_ids, chunk.lengths, chunk.row_sizes)
        report.add(chunk.tally)
        report.documents += len(chunk.row_sizes)
        report.tokens += len(chunk.input_ids)
    writer.finish()
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m mindspeed_llm.data.preprocess", description=__doc__)
    parser.add_argument("--input", nargs="+", type=Path, required=True, help="files or folders: json, jsonl, txt, ...")
    parser.add_argument("--output-prefix", type=Path, required=True, help="path of the .bin and .idx files, no ending")
    parser.add_argument("--tokenizer", required=True, help="folder of the tokenizer")
    parser.add_argument("--column", default="text", help="column of the text (default: text)")
    parser.add_argument("--no-append-eod", action="store_true", help="no eos token behind the documents")
    parser.add_argument("--workers", type=int, default=1, help="processes (default: 1)")
    options = parser.parse_args(arguments)
    if options.workers < 1:
        parser.error(f"--workers: {options.workers} is no number of processes")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        report = preprocess(
            options.input,
            options.output_prefix,
            options.tokenizer,
            column=options.column,
            append_eod=not options.no_append_eod,
            workers=options.workers,
        )
    except (UserError, OSError) as error:  # such as a disk that is full, or a folder that cannot be written
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.output_prefix}: {report.documents} documents, {report.tokens} tokens written by this run")
    if report.skipped:
        print(f"{report.skipped} rows skipped because they cannot be used\n{report.problems()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
