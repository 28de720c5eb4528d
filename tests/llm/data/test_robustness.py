"""Bad inputs end in a row that is skipped with its reason, or in one message; never in a traceback or a crash."""

from __future__ import annotations

import csv
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from mindspeed_llm.config import DatasetSource
from mindspeed_llm.data.chat_template import ChatTemplateEncoder
from mindspeed_llm.data.conversation import RowError
from mindspeed_llm.data.encode import EncodeOptions, TemplateEncoder
from mindspeed_llm.data.megatron.indexed import IndexedTokens
from mindspeed_llm.data.megatron.writer import IndexedWriter
from mindspeed_llm.data.prepare import ConversationChunks, Item
from mindspeed_llm.data.preprocess import main, preprocess
from mindspeed_llm.data.sources import open_source
from mindspeed_llm.data.specs import DatasetSpec, dataset_specs
from mindspeed_llm.data.stream import RawStream
from mindspeed_llm.data.templates import Style
from mindspeed_llm.data.templates.builtin import BUILTIN
from mindspeed_llm.data.tokenise import Tokeniser
from mindspeed_llm.errors import DataError, UserError

from .conftest import ORACLES, TODAY, Prepare, WriteRows, alpaca
from .megatron.writing import write_indexed

SLOW = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
FEW = settings(SLOW, max_examples=30)

TEXT = st.one_of(
    st.text(max_size=12), st.sampled_from(["", " ", "\ud800", "\0", "<|im_end|>", "{content}", '{"name": 1}'])
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)


def mostly(*usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """What belongs in a place, and sometimes anything else."""
    return st.one_of(*usual, *usual, JSON)


def objects(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """With some of these keys."""
    return st.fixed_dictionaries({}, optional={key: mostly(value) for key, value in keys.items()})


CALL = objects(name=TEXT, arguments=st.dictionaries(TEXT, JSON, max_size=2))
CALLS = st.lists(mostly(CALL, CALL.map(lambda call: {"function": call})), max_size=2)
SCHEMA = objects(type=TEXT, enum=JSON, items=JSON, description=TEXT, default=JSON, oneOf=JSON, properties=JSON)
PARAMETERS = objects(properties=st.dictionaries(TEXT, mostly(SCHEMA), max_size=2), required=st.lists(TEXT, max_size=2))
TOOL = objects(name=TEXT, description=TEXT, parameters=PARAMETERS, type=st.just("function"))
TOOLS = st.lists(TOOL, max_size=2)
ROLES = (("human", "user"), ("gpt", "assistant"), ("function_call", "assistant"), ("observation", "tool"))
MESSAGE = st.sampled_from(ROLES).flatmap(
    lambda role: objects(
        **{"from": st.just(role[0]), "role": st.just(role[1])},
        value=st.one_of(TEXT, CALL.map(json.dumps)),
        content=TEXT,
        tool_calls=CALLS,
    )
)
MESSAGES = st.lists(mostly(MESSAGE), max_size=4)
ROW = objects(
    instruction=TEXT,
    input=TEXT,
    output=TEXT,
    history=st.lists(st.lists(TEXT, min_size=2, max_size=2), max_size=2),
    conversations=MESSAGES,
    messages=MESSAGES,
    system=TEXT,
    tools=st.one_of(TOOLS, TOOLS.map(json.dumps)),
)
COLUMNS = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output", "history": "history"},
    "sharegpt": {"messages": "conversations"},
    "openai": {"messages": "messages"},
}
TEMPLATES = [None, *[template for template in BUILTIN if template.eos in (None, "<|im_end|>")]]


@FEW
@given(data=st.data())
def test_rows_of_any_content(data: st.DataObject, shared_tokenizer: PreTrainedTokenizerBase) -> None:
    check_rows(data, shared_tokenizer)


@pytest.mark.slow
@SLOW
@given(data=st.data())
def test_many_rows_of_any_content(data: st.DataObject, shared_tokenizer: PreTrainedTokenizerBase) -> None:
    check_rows(data, shared_tokenizer)


def check_rows(data: st.DataObject, tokenizer: PreTrainedTokenizerBase) -> None:
    """They become documents or reasons, in any format, template and mode."""
    formatting = data.draw(st.sampled_from(sorted(COLUMNS)))
    columns = COLUMNS[formatting] | {"system": "system", "tools": "tools"}
    [spec] = dataset_specs(DatasetSource(file_name=__file__, formatting=formatting, columns=columns), Path())  # type: ignore[arg-type]
    rows = data.draw(st.lists(ROW, min_size=1, max_size=3))
    template = data.draw(st.sampled_from(TEMPLATES))
    booleans = st.booleans()
    options = EncodeOptions(
        cutoff_len=data.draw(st.integers(1, 60)),
        drop_overlong=data.draw(booleans),
        llamafactory=data.draw(booleans),
        mask_history=data.draw(booleans),
        style=Style(today=TODAY, enable_thinking=data.draw(st.sampled_from([True, False, None]))),
    )
    encode: Any = ChatTemplateEncoder(tokenizer, options)
    if template is not None:
        encode = TemplateEncoder(template, Tokeniser(tokenizer, eos=template.eos), options)
    items = [Item(spec, f"row {number}", row) for number, row in enumerate(rows)]
    chunk = ConversationChunks(encode, options, data.draw(st.sampled_from([None, 60])), "<|im_end|>")(items)
    assert sum(chunk.lengths) == len(chunk.input_ids)
    assert sum(chunk.row_sizes) == len(chunk.lengths)
    assert all(length <= options.cutoff_len for length in chunk.lengths)
    assert options.llamafactory or all(length > 1 for length in chunk.lengths)
    tally = chunk.tally
    assert len(chunk.lengths) + len(tally.problems) + tally.overlong + tally.unlabelled >= len(rows)
    for problem in tally.problems:
        assert len(f"{problem.where}: {problem.reason}".encode()) < 2000  # can be read, and written into a report


def told(action: Callable[[], object]) -> str:
    """What the user is told; of a success what comes of it."""
    try:
        return repr(action())
    except UserError as error:
        return str(error)


@FEW
@given(entry=mostly(objects(file_name=TEXT, formatting=TEXT, columns=JSON, tags=JSON, num_samples=st.integers())))
def test_any_dataset_info(entry: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "dataset_info.json").write_text(json.dumps({"a": entry}))
    specs = told(lambda: dataset_specs("a", folder))
    assert specs.startswith("[DatasetSpec(") or "dataset_info.json" in specs


def write_kind(path: Path) -> None:
    """A good file of the kind that its name says."""
    rows = [alpaca(f"Question {index}", "等于 " * 20) for index in range(20)]
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=7)
    elif path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([rows[0].keys(), *(row.values() for row in rows)])
    else:
        text = json.dumps(rows) if path.suffix == ".json" else "\n".join(map(json.dumps, rows))
        path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "txt", "parquet"])
@settings(FEW, max_examples=15)
@given(data=st.data())
def test_damaged_files(kind: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Cut off, or with bytes in them that do not belong there; prepared and streamed."""
    path = tmp_path_factory.mktemp("damaged") / f"rows.{kind}"
    write_kind(path)
    content = bytearray(path.read_bytes())
    del content[data.draw(st.integers(0, len(content))) :]
    for _ in range(data.draw(st.integers(0, 3)) if content else 0):
        start = data.draw(st.integers(0, len(content) - 1))
        content[start : start + 2] = data.draw(st.binary(min_size=1, max_size=3))
    path.write_bytes(content)
    for read in (read_all, stream_all):
        assert str(path) in told(lambda read=read: read(path))  # type: ignore[misc]


def read_all(path: Path) -> Path:
    source = open_source(path)
    for index in range(len(source)):
        try:
            assert isinstance(source[index], dict)
        except RowError:
            assert source.where(index).startswith(str(path))
    return path


def stream_all(path: Path) -> Path:
    for row in RawStream([DatasetSpec(name="a", path=path)], "concat", None, 0).block(50):
        assert isinstance(row.item().row, dict | RowError)
    return path


@pytest.mark.parametrize("content", [b"", b"nonsense", b"ARROW1"])
def test_no_arrow_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "rows.arrow").write_bytes(content)
    with pytest.raises(DataError, match=r"rows\.arrow: not an arrow file"):
        open_source(tmp_path / "rows.arrow")


@pytest.mark.parametrize(
    "line",
    ['{"instruction": "\\ud800", "output": "x"}', "[" * 100_000, '{"n": ' + "9" * 5000 + "}", '{"instruction": NaN}'],
    ids=["half a pair", "brackets", "digits", "not a number"],
)
def test_lines_that_json_reads_or_python_does_not(line: str, prepare: Prepare, write_rows: WriteRows) -> None:
    path = write_rows([alpaca(), line])
    for data in (prepare(path, template="chatml"), prepare(path)):
        assert (len(data.train), data.reports[0].skipped) == (1, 1)
        assert f"{path}:2: " in data.report
    texts = write_rows([{"text": "Hi"}, line.replace("instruction", "text")], "texts.jsonl")
    assert prepare(texts, stage="pt").reports[0].skipped == 1


def test_values_of_columnar_files_that_json_has_not(prepare: Prepare, tmp_path: Path) -> None:
    call = {"name": "book", "arguments": {"day": datetime.date(2025, 1, 15)}}
    messages = [
        {"role": "user", "content": "Book it", "tool_calls": None},
        {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
    ]
    pq.write_table(pa.Table.from_pylist([{"messages": messages}]), tmp_path / "rows.parquet")
    entry = {"file_name": str(tmp_path / "rows.parquet"), "formatting": "openai"}
    with pytest.raises(DataError, match="its tool calls cannot be written as JSON"):
        prepare(entry, template="qwen3")


def test_texts_in_a_parquet_file_that_are_not_utf_8(prepare: Prepare, tmp_path: Path) -> None:
    texts = pa.array([b"Hi", b"\xc0\xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": texts}), tmp_path / "rows.parquet")
    data = prepare(tmp_path / "rows.parquet", stage="pt")
    assert data.reports[0].skipped == 1
    assert "rows.parquet: row 2: a text of it is not UTF-8" in data.report


def test_long_texts_in_csv(tmp_path: Path) -> None:
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], ["x" * 200_000]])
    assert len(open_source(tmp_path / "rows.csv")[0]["text"]) == 200_000


@FEW
@given(data=st.data())
def test_damaged_indices(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever is read, it is as long as the index says and lies in the file."""
    prefix = write_indexed(tmp_path_factory.mktemp("damaged") / "corpus", [[1, 2, 3], [4], [5, 6]])
    path = Path(f"{prefix}.idx")
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(9, len(content) - 1))
        content[start] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    assert "corpus" in told(lambda: read_documents(prefix))


def read_documents(prefix: Path) -> Path:
    tokens = IndexedTokens(prefix)
    for document in range(len(tokens)):
        assert len(tokens.read(document)) == tokens.lengths[document]
    return prefix


@pytest.mark.parametrize("broken", ["[]", "{}", '{"identity": 1}', "nonsense"])
def test_progress_that_cannot_be_read_is_none(broken: str, tmp_path: Path) -> None:
    (tmp_path / "corpus.progress.json").write_text(broken)
    assert IndexedWriter(tmp_path / "corpus", np.uint16, "mine").chunks == 0


def test_progress_whose_files_are_gone_is_none(tmp_path: Path) -> None:
    """Its bytes would be zeros."""
    text, tokenizer = ORACLES / "data" / "text.jsonl", str(ORACLES / "tokenizer")
    writer = IndexedWriter(tmp_path / "corpus", np.uint16, "mine")
    writer.write(np.arange(5), [5], [1])
    for path in tmp_path.glob("*.partial"):
        path.unlink()
    assert IndexedWriter(tmp_path / "corpus", np.uint16, "mine").chunks == 0
    preprocess([text], tmp_path / "corpus", tokenizer)
    assert (tmp_path / "corpus.bin").read_bytes() == (ORACLES / "megatron" / "corpus_a.bin").read_bytes()


def test_an_output_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    arguments = ["--input", str(ORACLES / "data" / "text.jsonl"), "--tokenizer", str(ORACLES / "tokenizer")]
    assert main([*arguments, "--output-prefix", str(tmp_path / "file" / "corpus")]) == 2
    assert "error: " in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--output-prefix", str(tmp_path / "corpus"), "--workers", "0"])
    assert ended.value.code == 2
    assert "--workers: 0 is no number of processes" in capsys.readouterr().err
