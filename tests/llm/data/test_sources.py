"""Files of every kind, folders of them, dataset_info.json, and what is said about broken ones."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mindspeed_llm.data.conversation import RowError
from mindspeed_llm.data.sources import Source, data_files, open_source
from mindspeed_llm.data.specs import dataset_specs
from mindspeed_llm.errors import ConfigError, DataError

from .conftest import Prepare, WriteRows, alpaca

ROWS = [alpaca(f"Question {i}?", f"Answer {i} — 等于。") for i in range(3)]


def open_sources(path: Path) -> list[Source]:
    return [open_source(file) for file in data_files(path)]


def write_as(kind: str, folder: Path) -> Path:
    path = folder / f"rows.{kind}"
    table = pa.Table.from_pylist(ROWS)
    if kind == "json":
        path.write_text(json.dumps(ROWS, indent=1), encoding="utf-8")
    elif kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")  # no newline at the end
    elif kind == "csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, ROWS[0])
            writer.writeheader()
            writer.writerows(ROWS)
    elif kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "parquet", "arrow"])
def test_every_kind_of_file_gives_the_same_rows(kind: str, tmp_path: Path) -> None:
    [source] = open_sources(write_as(kind, tmp_path))
    assert [source[index] for index in range(len(source))] == ROWS


def test_an_arrow_file_in_the_file_format(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    [source] = open_sources(tmp_path / "x.arrow")
    assert [source[index] for index in range(len(source))] == ROWS


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name in ("b/2.jsonl", "a.jsonl", ".hidden/0.jsonl", "b/1.json"):
        (tmp_path / name).write_text(json.dumps({"name": name}) + "\n", encoding="utf-8")
    (tmp_path / "dataset_info.json").write_text("{}", encoding="utf-8")
    (tmp_path / "README.md").write_text("about", encoding="utf-8")
    rows = [source[0]["name"] for source in open_sources(tmp_path)]
    assert rows == ["a.jsonl", "b/1.json", "b/2.jsonl"]


def test_json_lines_under_the_name_json(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    assert len(open_sources(path)[0]) == 3


def test_text_lines(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes("\ufeffone\r\n\n  \nzwei 二\n".encode())
    [source] = open_sources(path)
    assert [source[index] for index in range(len(source))] == [{"text": "one"}, {"text": "zwei 二"}]
    assert source.where(1) == f"{path}:4"


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_files_without_rows(content: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content, encoding="utf-8")
    assert len(open_sources(path)[0]) == 0


def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path: Path) -> None:
    for name, text in (("a.json", json.dumps(ROWS)), ("b.jsonl", json.dumps(ROWS[0])), ("c.csv", "instruction\nHi\n")):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert "instruction" in open_sources(tmp_path / name)[0][0]


def test_broken_lines_are_named(tmp_path: Path) -> None:
    # LLaMA-Factory#7016: a UnicodeDecodeError that named neither file nor line.
    path = tmp_path / "rows.jsonl"
    good = json.dumps(ROWS[0]).encode()
    path.write_bytes(good + b'\n\n{"instruction": \n{"instruction": "\xc0"}\n[1]\n' + good)
    [source] = open_sources(path)
    reasons = {}
    for index in range(len(source)):
        try:
            source[index]
        except RowError as error:
            reasons[source.where(index)] = str(error)
    offset = path.read_bytes().index(b"\xc0")
    assert reasons == {
        f"{path}:3": "not JSON: Expecting value at column 17",
        f"{path}:4": f"byte 0xc0 at offset {offset} of the file is not UTF-8",
        f"{path}:5": "not a JSON object but list",
    }


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"a": 1},\n{"a": 2', "a.json:2: not JSON"),
        ("a.json", b'[\n\n{"a": "\xff"}]', "a.json:3: byte 0xff at offset 10 is not UTF-8"),
        ("a.csv", b"a,b\n1,\xfe\n", "a.csv:2: byte 0xfe at offset 6"),
        ("a.parquet", b"no", "a.parquet: not a parquet file"),
        ("a.arrow", b"nonsense", "a.arrow: not an arrow file"),
        ("a.xlsx", b"", "unknown kind of data file '.xlsx'; known are .json, .jsonl"),
    ],
)
def test_files_that_cannot_be_read_at_all(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        open_sources(tmp_path / name)
    assert message in str(error.value)


def test_a_folder_without_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data file in this folder"):
        open_sources(tmp_path)


def info(folder: Path, **entries: Any) -> Path:
    (folder / "dataset_info.json").write_text(json.dumps(entries), encoding="utf-8")
    return folder


def test_data_sets_by_name(write_rows: WriteRows, tmp_path: Path, prepare: Prepare) -> None:
    write_rows(ROWS, "one.jsonl")
    write_rows(ROWS[:2], "two.jsonl")
    info(tmp_path, one={"file_name": "one.jsonl"}, two={"file_name": "two.jsonl"})
    data = prepare("two, one", dataset_dir=str(tmp_path), template="chatml")
    assert len(data.train) == 5
    swapped = prepare("one,two", dataset_dir=str(tmp_path), template="chatml")
    order = [data.train[index]["input_ids"].tolist() for index in (2, 3, 4, 0, 1)]
    assert [swapped.train[index]["input_ids"].tolist() for index in range(5)] == order


def test_an_unknown_name(tmp_path: Path) -> None:
    info(tmp_path, alpaca={"file_name": "x"}, other={"file_name": "x"})
    with pytest.raises(ConfigError, match=r"no data set 'alpca'. Did you mean 'alpaca'\? It has: alpaca, other"):
        dataset_specs("alpca", tmp_path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"file_name": "x", "ranking": True}, "preference pairs"),
        ({"file_name": "x", "columns": {"chosen": "c"}}, "preference pairs"),
        ({"file_name": "x", "columns": {"images": "i"}}, "has images, but only text is supported"),
        ({"hf_hub_url": "a/b"}, "hf_hub_url: only local files are read"),
        ({}, "no file_name: only local files"),
        ({"file_name": "gone.json"}, "file_name 'gone.json': there is no"),
        ({"file_name": "x", "formating": "alpaca"}, "unknown key 'formating'. Did you mean 'formatting'?"),
        ({"file_name": "x", "formatting": "alpca"}, "formatting 'alpca' is not one of alpaca, sharegpt, openai"),
        ({"file_name": "x", "columns": {"promt": "a"}}, "unknown key 'promt'. Did you mean 'prompt'?"),
        ({"file_name": "x", "tags": {"rol_tag": "a"}}, "unknown key 'rol_tag'. Did you mean 'role_tag'?"),
    ],
)
def test_entries_that_are_refused(entry: dict[str, Any], message: str, tmp_path: Path) -> None:
    info(tmp_path, broken=entry)
    (tmp_path / "x").mkdir()
    with pytest.raises((ConfigError, DataError)) as error:
        dataset_specs("broken", tmp_path)
    assert message in str(error.value)
    assert "dataset_info.json: broken" in str(error.value)


def test_no_dataset_info(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no .*dataset_info\.json that says what it is"):
        dataset_specs("alpaca", tmp_path)


def test_num_samples_and_max_samples(write_rows: WriteRows, prepare: Prepare) -> None:
    path = write_rows([alpaca(str(i), str(i)) for i in range(10)])
    source = {"file_name": str(path)}

    def answers(**options: Any) -> list[str]:
        data = prepare({**source, **options.pop("entry", {})}, template="chatml", **options)
        return [row["labels"][row["labels"] != -100][0] for row in (data.train[i] for i in range(len(data.train)))]

    everything = answers()
    assert answers(max_samples=4) == everything[:4]
    some = answers(entry={"num_samples": 6})
    assert len(set(some)) == 6
    more = answers(entry={"num_samples": 25})
    assert {more.count(token) for token in everything} == {2, 3}  # none a third time before all were taken twice
    assert answers(entry={"num_samples": 6}) == some
