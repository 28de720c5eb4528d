"""Reading ``.bin`` and ``.idx`` files, and telling what is wrong with broken ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_llm.data.megatron.indexed import IndexedTokens
from mindspeed_llm.errors import DataError
from tests.llm.data.megatron.writing import write_indexed

from ..conftest import ORACLES

DOCUMENTS = [[1, 2, 3], [], [65535, 4]]


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_documents_are_read_whole_and_in_part(dtype: str, tmp_path: Path) -> None:
    tokens = IndexedTokens(write_indexed(tmp_path / "corpus", DOCUMENTS, dtype))
    assert [tokens.read(document).tolist() for document in range(len(tokens))] == DOCUMENTS
    assert tokens.read(0, 1).tolist() == [2, 3]
    assert tokens.read(0, 1, 1).tolist() == [2]
    assert tokens.read(2, 1, 9).tolist() == [4]  # nothing of what follows
    assert tokens.read(0, 2, 9).tolist() == [3]


def test_files_of_megatron_are_read() -> None:
    tokens = IndexedTokens(ORACLES / "megatron" / "corpus_a")
    assert len(tokens) == 120
    assert int(tokens.lengths.sum()) * 2 == (ORACLES / "megatron" / "corpus_a.bin").stat().st_size
    assert {int(tokens.read(document)[-1]) for document in range(120)} == {962}  # end of document


def test_a_corpus_without_tokens(tmp_path: Path) -> None:
    tokens = IndexedTokens(write_indexed(tmp_path / "corpus", [[]]))
    assert [tokens.read(document).tolist() for document in range(len(tokens))] == [[]]


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_missing_file(ending: str, tmp_path: Path) -> None:
    write_indexed(tmp_path / "corpus", DOCUMENTS).with_suffix(ending).unlink()
    with pytest.raises(DataError, match=rf"there is no .*corpus\{ending}: an indexed data set is a pair"):
        IndexedTokens(tmp_path / "corpus")


@pytest.mark.parametrize(
    ("ending", "start", "replacement", "message"),
    [
        (".idx", 0, b"PK", r"corpus\.idx is no index of Megatron: it begins with b'PKIDIDX"),
        (".idx", 9, b"\2", r"corpus\.idx has version 2; only version 1"),
        (".idx", 17, b"\7", r"corpus\.idx has tokens of type 7; known are 4 \(int32\) and 8 \(uint16\)"),
    ],
)
def test_a_wrong_header(ending: str, start: int, replacement: bytes, message: str, tmp_path: Path) -> None:
    path = write_indexed(tmp_path / "corpus", DOCUMENTS).with_suffix(ending)
    content = path.read_bytes()
    path.write_bytes(content[:start] + replacement + content[start + len(replacement) :])
    with pytest.raises(DataError, match=message):
        IndexedTokens(tmp_path / "corpus")


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        (".idx", r"corpus\.idx is cut off: 101 bytes, 102 for its 3 documents"),
        (".bin", r"corpus\.bin is cut off: 9 bytes, corpus\.idx asks for 10"),
    ],
)
def test_a_file_cut_off(ending: str, message: str, tmp_path: Path) -> None:
    path = write_indexed(tmp_path / "corpus", DOCUMENTS).with_suffix(ending)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=message):
        IndexedTokens(tmp_path / "corpus")


def test_an_index_cut_off_in_its_header(tmp_path: Path) -> None:
    path = write_indexed(tmp_path / "corpus", DOCUMENTS).with_suffix(".idx")
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(DataError, match="within its header of 34 bytes"):
        IndexedTokens(tmp_path / "corpus")
