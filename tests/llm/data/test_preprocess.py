"""The preprocess command writes what Megatron's own builder writes, however often it is stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mindspeed_llm.data.megatron.indexed import IndexedTokens
from mindspeed_llm.data.megatron.writer import IndexedWriter, token_type
from mindspeed_llm.data.preprocess import main, preprocess
from mindspeed_llm.errors import DataError
from tests.distributed import REPOSITORY

from .conftest import ORACLES

RECORDED = ORACLES / "megatron"
TEXT = ORACLES / "data" / "text.jsonl"
TOKENIZER = str(ORACLES / "tokenizer")


def content(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.mark.parametrize("workers", [1, 2])
def test_files_are_those_of_megatron(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindspeed_llm.data.prepare._ALONE", -1.0)  # the other processes take part
    report = preprocess([TEXT], tmp_path / "corpus", TOKENIZER, workers=workers, chunk_size=7)
    assert content(tmp_path / "corpus") == content(RECORDED / "corpus_a")
    assert (report.documents, report.tokens, report.skipped) == (120, 8610, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.bin", "corpus.idx"]


@pytest.mark.parametrize(
    ("name", "dtype", "documents"),
    [
        ("builder_uint16", np.uint16, [[1, 2, 3], [], [65535, 0], [7]]),
        ("builder_int32", np.int32, [[70000, 2], [5], []]),
    ],
)
def test_types_and_empty_documents(name: str, dtype: type, documents: list[list[int]], tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / name, dtype, "")
    for document in documents:
        tokens = np.array(document, np.int64)
        writer.write(tokens, [len(document)] if document else [], [int(bool(document))])
    writer.finish()
    assert content(tmp_path / name) == content(RECORDED / name)


def test_small_vocabularies_take_two_bytes_a_token() -> None:
    assert [token_type(size) for size in (998, 65499, 65500, 150000)] == [np.uint16, np.uint16, np.int32, np.int32]


@pytest.mark.parametrize("kind", ["txt", "parquet", "json", "folder"])
def test_other_files_and_no_end_of_document(kind: str, tmp_path: Path) -> None:
    texts = [json.loads(line)["text"].replace("\n", " ") for line in TEXT.read_text(encoding="utf-8").splitlines()][:9]
    path = tmp_path / f"text.{kind}"
    if kind == "txt":
        path.write_text("\n".join(texts), encoding="utf-8")
    elif kind == "parquet":
        pq.write_table(pa.table({"body": texts}), path)
    elif kind == "json":
        path.write_text(json.dumps([{"body": text} for text in texts]))
    else:
        path.mkdir()
        for index in range(0, 9, 3):
            (path / f"{index}.txt").write_text("\n".join(texts[index : index + 3]), encoding="utf-8")
    column = "text" if kind in ("txt", "folder") else "body"
    preprocess([path], tmp_path / "out", TOKENIZER, column=column, append_eod=False)
    tokens = IndexedTokens(tmp_path / "out")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    assert [tokenizer.decode(tokens.read(index)) for index in range(len(tokens))] == texts


@pytest.mark.parametrize("done", [0, 1, 4])
def test_going_on_after_a_crash(done: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was written after the last chunk that counts is cut off."""
    write = IndexedWriter.write

    def fail(self: IndexedWriter, tokens: np.ndarray, *rest: object) -> None:
        if self.chunks == done:
            self._files[0].write(tokens.tobytes()[:50])
            self._files[1].write(b"123")
            for file in self._files:
                file.close()
            raise KeyboardInterrupt
        write(self, tokens, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(IndexedWriter, "write", fail)
    with pytest.raises(KeyboardInterrupt):
        preprocess([TEXT], tmp_path / "corpus", TOKENIZER, chunk_size=20)
    assert not (tmp_path / "corpus.idx").exists()
    monkeypatch.setattr(IndexedWriter, "write", write)
    report = preprocess([TEXT], tmp_path / "corpus", TOKENIZER, chunk_size=20)
    assert report.documents == 120 - 20 * done  # the others were kept
    assert content(tmp_path / "corpus") == content(RECORDED / "corpus_a")


def test_a_killed_command_goes_on(tmp_path: Path) -> None:
    line = TEXT.read_text(encoding="utf-8")
    (tmp_path / "text.jsonl").write_text(line * 60, encoding="utf-8")  # 7,200 documents
    command = [sys.executable, "-m", "mindspeed_llm.data.preprocess", "--input", str(tmp_path / "text.jsonl")]
    command += ["--output-prefix", str(tmp_path / "corpus"), "--tokenizer", TOKENIZER]
    first = subprocess.Popen(command, cwd=REPOSITORY)
    while not (tmp_path / "corpus.progress.json").exists():
        assert first.poll() is None
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert not (tmp_path / "corpus.idx").exists()
    assert json.loads((tmp_path / "corpus.progress.json").read_text())["chunks"] > 0
    finished = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True)
    assert "going on after" in finished.stderr
    assert content(tmp_path / "corpus")[0] == content(RECORDED / "corpus_a")[0] * 60


def test_another_command_starts_afresh(tmp_path: Path) -> None:
    stopped = IndexedWriter(tmp_path / "corpus", np.uint16, "another")
    stopped.write(np.arange(5), [5], [1])
    preprocess([TEXT], tmp_path / "corpus", TOKENIZER)
    assert content(tmp_path / "corpus") == content(RECORDED / "corpus_a")
    preprocess([TEXT], tmp_path / "corpus", TOKENIZER, append_eod=False)  # replaces what is there
    assert IndexedTokens(tmp_path / "corpus").count(range(120)) == 8490


def test_rows_without_text_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "one"}\n{broken\n{"text": ""}\n{"body": "two"}\n{"text": 3}\n')
    arguments = ["--input", str(path), "--output-prefix", str(tmp_path / "out"), "--tokenizer", TOKENIZER]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "2 documents" in shown  # the empty one too, as in Megatron
    assert "3 rows skipped" in shown
    assert f"{path}:2: not JSON" in shown
    assert f"{path}:4: no column 'text'" in shown
    assert len(IndexedTokens(tmp_path / "out")) == 1


def test_what_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="the files are empty"):
        preprocess([tmp_path / "empty.jsonl"], tmp_path / "out", TOKENIZER)
    out = ["--output-prefix", str(tmp_path / "out")]
    assert main(["--input", str(tmp_path / "gone.jsonl"), *out, "--tokenizer", TOKENIZER]) == 2
    assert "gone.jsonl" in capsys.readouterr().err
    assert main(["--input", str(TEXT), *out, "--tokenizer", str(tmp_path)]) == 2
    assert "error: --tokenizer" in capsys.readouterr().err
