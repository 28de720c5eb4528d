"""Streamed rows: each once per pass over all ranks, in the order of the mixture, and from any place that was saved."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from mindspeed_llm.config import Config
from mindspeed_llm.data.collate import Collator
from mindspeed_llm.data.factory import Data, DataFactory
from mindspeed_llm.data.mixing import mixed_order
from mindspeed_llm.data.prepare import Chunk, Item
from mindspeed_llm.data.report import Problem, Tally
from mindspeed_llm.data.specs import DatasetSpec
from mindspeed_llm.data.stream import RawStream
from mindspeed_llm.data.stream_loader import RowStream, StreamedData, StreamLoader
from mindspeed_llm.data.training_loader import training_loader
from mindspeed_llm.errors import ConfigError, DataError, UserError

from .conftest import Prepare, WriteRows, alpaca, make_config


def write_texts(path: Path, texts: Sequence[str]) -> None:
    """A file of the kind that its name says, one row of ``{"text": ...}`` each; parquet in row groups of three."""
    rows = [{"text": text} for text in texts]
    if path.suffix == ".txt":
        path.write_text("\ufeff" + "\n\n".join(texts), encoding="utf-8")  # with blank lines and a byte order mark
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\r\n \n" for row in rows))


def data_set(folder: Path, name: str, size: int, kinds: Sequence[str] = ("jsonl",)) -> DatasetSpec:
    """Rows ``name0``, ``name1``, ... in a file of each kind, about equally many."""
    (folder / name).mkdir()
    for number, (kind, part) in enumerate(zip(kinds, np.array_split(range(size), len(kinds)), strict=True)):
        write_texts(folder / name / f"{number}.{kind}", [f"{name}{index}" for index in part])
    return DatasetSpec(name=name, path=folder / name)


def texts_of(stream: RawStream, block: int, passes: int = 1) -> list[str]:
    texts: list[str] = []
    while stream.passes < passes:
        texts += [row.load()["text"] for row in stream.block(block)]
    return texts


@pytest.mark.parametrize("strategy", ["concat", "interleave_under", "interleave_over"])
@pytest.mark.parametrize("probabilities", [None, [0.2, 0.5, 0.3]])
def test_a_pass_is_the_mixture_of_prepared_data(strategy: Any, probabilities: Any, tmp_path: Path) -> None:
    sizes = (7, 3, 5)
    specs = [
        data_set(tmp_path, name, size, kinds)
        for name, size, kinds in zip("abc", sizes, (("txt", "jsonl"), ("parquet",), ("json", "jsonl")), strict=True)
    ]
    everything = [f"{name}{index}" for name, size in zip("abc", sizes, strict=True) for index in range(size)]
    expected = [everything[index] for index in mixed_order(sizes, strategy, probabilities, 5)]
    stream = RawStream(specs, strategy, probabilities, 5)
    assert texts_of(stream, 4, passes=2) == expected * 2
    # and from every place in it
    for taken in range(1, len(expected)):
        stream = RawStream(specs, strategy, probabilities, 5)
        begun = [row.load()["text"] for row in stream.block(taken)]
        position = json.loads(json.dumps(stream.position))
        assert begun + texts_of(RawStream(specs, strategy, probabilities, 5, position), 100) == expected


def test_rows_are_named_and_broken_ones_told(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n{broken\n{"text": "\xc0"}\n')
    rows = [row.item() for row in RawStream([DatasetSpec(name="a", path=path)], "concat", None, 0).block(10)]
    assert [item.where for item in rows] == [f"{path}:1", f"{path}:3", f"{path}:4"]
    assert "not JSON" in str(rows[1].row)
    assert f"byte 0xc0 at offset {path.read_bytes().index(0xC0)} of the file is not UTF-8" in str(rows[2].row)


class NumberedChunks:
    """Encodes row *i* as tokens *i* + 1, one to three of them; every fifth row cannot be used. Two rows are packed."""

    def __init__(self, packed: bool = False) -> None:
        self.packed = packed

    def __call__(self, items: Sequence[Item]) -> Chunk:
        numbers = [int(item.row["text"][1:]) for item in items]  # type: ignore[index]
        good = [number for number in numbers if number % 5 != 4]
        lengths = [1 + number % 3 for number in good]
        tokens = np.repeat(np.array(good, np.int32) + 1, lengths)
        sizes = [2] * (len(good) // 2) + [1] * (len(good) % 2) if self.packed else [1] * len(good)
        problems = [Problem(item.where, "a fifth") for item in items if int(item.row["text"][1:]) % 5 == 4]  # type: ignore[index]
        return Chunk(tokens, tokens, lengths, sizes, Tally(problems=problems))


def streamed(spec: DatasetSpec, *, packed: bool = False, **options: Any) -> StreamedData:
    options = {"buffer_size": 8, "chunk_size": 3, "seed": 1} | options
    return StreamedData(specs=[spec], encode=NumberedChunks(packed), **options)


def numbers_in(rows: Sequence[Any]) -> list[int]:
    return [int(token) - 1 for row in rows for token in np.unique(row["input_ids"])]


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 40),
    world_size=st.integers(1, 3),
    buffer_size=st.integers(3, 50),
    chunk_size=st.integers(1, 20),
    packed=st.booleans(),
    shuffle=st.booleans(),
)
def test_every_row_once_per_pass_over_all_ranks(
    size: int, world_size: int, buffer_size: int, chunk_size: int, packed: bool, shuffle: bool, tmp_path_factory: Any
) -> None:
    spec = data_set(tmp_path_factory.mktemp("data"), "a", size)
    usable = [number for number in range(size) if number % 5 != 4]
    data = streamed(spec, packed=packed, buffer_size=buffer_size, chunk_size=chunk_size, shuffle=shuffle)
    raw = RawStream(data.specs, "concat", None, 1)
    blocks = [raw.block(buffer_size) for _ in range(-(-size // buffer_size))]
    for number, block in enumerate(blocks):  # dealt out: every row of the block to one rank
        shares = [RowStream(data, rank, world_size)._share(block, number) for rank in range(world_size)]
        assert sorted(row.where for share in shares for row in share) == sorted(row.where for row in block)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    if world_size == 1:
        rows = iter(RowStream(data))
        for _ in range(2):
            seen: list[int] = []
            while len(seen) < len(usable):
                seen += numbers_in([next(rows)])
            assert sorted(seen) == usable
            if not shuffle and not packed:
                assert seen == usable
            # a row never leaves its block
            bounds = np.searchsorted(usable, np.arange(0, size + buffer_size, buffer_size))
            assert all(sorted(seen[a:b]) == usable[a:b] for a, b in pairwise(bounds))


def test_passes_are_shuffled_differently(tmp_path: Path) -> None:
    rows = RowStream(streamed(data_set(tmp_path, "a", 40), buffer_size=100))
    seen = numbers_in(list(islice(iter(rows), 64)))
    assert sorted(seen[:32]) == sorted(seen[32:])
    assert seen[:32] != seen[32:]


def loader_of(data: StreamedData, rank: int = 0, world_size: int = 1, steps: int = 9) -> StreamLoader:
    return StreamLoader(
        RowStream(data, rank, world_size), batch_size=2, accumulation=2, num_steps=steps, collate=Collator(0)
    )


@pytest.mark.parametrize("packed", [False, True])
def test_resuming_at_any_step_changes_nothing(packed: bool, tmp_path: Path) -> None:
    data = streamed(data_set(tmp_path, "a", 23, ("jsonl", "parquet", "txt")), packed=packed)
    for rank in range(2):
        whole = [[batch["input_ids"].tolist() for batch in window] for window in loader_of(data, rank, 2)]
        assert len(whole) == len(loader_of(data, rank, 2)) == 9
        for stop in range(1, 9):
            first = loader_of(data, rank, 2)
            begun = list(islice(first, stop))
            state = json.loads(json.dumps(first.state_dict()))
            other = {str(1 - rank): {"raw": None, "block": 0, "chunk": 0, "row": 0}}
            rest = loader_of(data, rank, 2)
            rest.load_state_dict(state | {"ranks": state["ranks"] | other})
            windows = begun + list(rest)
            assert [[batch["input_ids"].tolist() for batch in window] for window in windows] == whole


def test_the_state_holds_the_place_of_every_rank(tmp_path: Path) -> None:
    data = streamed(data_set(tmp_path, "a", 23))
    ranks = [loader_of(data, rank, 2) for rank in range(2)]
    for one in ranks:
        next(iter(one))
    places = [{one.rows.rank: one.rows.position} for one in ranks]
    for one in ranks:
        one._gather = lambda value: places
    assert ranks[0].state_dict() == ranks[1].state_dict()
    assert set(ranks[0].state_dict()["ranks"]) == {"0", "1"}
    with pytest.raises(UserError, match="a run of 2 data-parallel ranks cannot go on with 1"):
        loader_of(data).load_state_dict(ranks[0].state_dict())


def test_a_stream_without_a_usable_row_ends(tmp_path: Path) -> None:
    write_texts(tmp_path / "a.jsonl", ["a4", "a9"])
    spec = DatasetSpec(name="a", path=tmp_path / "a.jsonl")
    for world_size in (1, 3):
        with pytest.raises(DataError, match="no row of the stream can be used:\n") as error:
            next(iter(RowStream(streamed(spec), 0, world_size)))
        assert "x a fifth" in str(error.value)
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(DataError, match="data set 'a' has no rows"):
        next(iter(RowStream(streamed(spec))))


def test_fewer_rows_than_ranks(tmp_path: Path) -> None:
    """A rank without rows in one pass has some in the next."""
    data = streamed(data_set(tmp_path, "a", 2))
    for rank in range(3):
        rows = islice(iter(RowStream(data, rank, 3)), 6)
        assert set(numbers_in(list(rows))) == {0, 1}
    with pytest.raises(DataError, match="buffer_size: 8 rows cannot be dealt out to 9 ranks"):
        RowStream(data, 0, 9)


def test_bad_rows_are_told_once_and_limited(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("mindspeed_llm"), "propagate", True)
    spec = data_set(tmp_path, "a", 40)
    list(islice(iter(RowStream(streamed(spec))), 60))
    told = {record.getMessage() for record in caplog.records}
    assert len(told) == 5  # the first ones
    assert f"{spec.path}/0.jsonl:9: row skipped: a fifth" in told
    with pytest.raises(DataError, match=r"more than data.max_bad_rows = 2 rows cannot be used:"):
        list(islice(iter(RowStream(streamed(spec, max_bad_rows=2))), 60))


Stream = Callable[..., tuple[Config, Data]]


@pytest.fixture
def stream(tmp_path: Path, shared_tokenizer: PreTrainedTokenizerBase) -> Stream:
    """``stream(file, stage=..., **data keys)``: the streamed data of a run of six steps, and its configuration."""

    def run(
        path: Path | dict[str, Any], *, stage: str = "sft", shuffle: bool = True, **data: Any
    ) -> tuple[Config, Data]:
        dataset = {"file_name": str(path)} if isinstance(path, Path) else path
        data = {"dataset": dataset, "streaming": True, **data}
        training = {"stage": stage, "max_steps": 6, "per_device_train_batch_size": 2, "disable_shuffling": not shuffle}
        config = make_config(tmp_path / "out", data, training)
        return config, DataFactory(config, shared_tokenizer).create()

    return run


@pytest.mark.parametrize(
    "keys",
    [
        {"template": "chatml"},
        {"template": "chatml", "packing": True, "cutoff_len": 64},
        {"stage": "pt", "cutoff_len": 16, "columns": {"prompt": "output"}},
    ],
    ids=["sft", "packing", "pt"],
)
def test_rows_are_those_of_prepared_data(
    keys: dict[str, Any], stream: Stream, prepare: Prepare, write_rows: WriteRows
) -> None:
    keys = dict(keys)
    path = write_rows([alpaca(f"Question {i}?", "word " * (1 + i % 7)) for i in range(12)])
    dataset = {"file_name": str(path), "columns": keys.pop("columns", {})}
    prepared = prepare(dataset, **keys).train
    _, data = stream(dataset, shuffle=False, **keys)
    assert isinstance(data.train, StreamedData)
    rows = list(islice(iter(RowStream(data.train)), len(prepared)))
    for key in ("input_ids", "labels", "lengths"):
        expected = [prepared[index][key].tolist() for index in range(len(prepared))]  # type: ignore[literal-required]
        assert [row[key].tolist() for row in rows] == expected  # type: ignore[literal-required]
    assert data.first_row["input_ids"].tolist() == rows[0]["input_ids"].tolist()


def test_a_run_takes_max_steps(stream: Stream, write_rows: WriteRows) -> None:
    config, data = stream(write_rows([alpaca()] * 5), template="chatml")
    loader = training_loader(data, config.training, pad_token_id=0)
    assert len(loader) == 6
    assert [len(window) for window in loader] == [1] * 6


def test_evaluation_data_is_prepared(stream: Stream, write_rows: WriteRows) -> None:
    evaluation = {"file_name": str(write_rows([alpaca()] * 3, "eval.jsonl"))}
    _, data = stream(write_rows([alpaca()] * 5), template="chatml", eval_dataset=evaluation)
    assert len(data.eval["eval"]) == 3
    assert "data eval: 3 rows read" in data.report


def test_what_streaming_cannot_do(stream: Stream, write_rows: WriteRows, tmp_path: Path) -> None:
    path = write_rows([alpaca()] * 5)
    with pytest.raises(ConfigError, match="num_samples needs all rows at hand"):
        stream({"file_name": str(path), "num_samples": 2}, template="chatml")  # type: ignore[arg-type]
