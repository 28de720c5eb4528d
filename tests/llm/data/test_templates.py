"""What a template trains on, beyond the recorded cases: our defaults where LLaMA-Factory has a quirk, and plugins."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from mindspeed_llm.data.conversation import Conversation, Message, RowError, ToolCall
from mindspeed_llm.data.encode import Document, EncodeOptions, TemplateEncoder, truncated_lengths
from mindspeed_llm.data.templates import Content, Style, Template, get_template, register_template
from mindspeed_llm.data.tokenise import Tokeniser
from mindspeed_llm.errors import ConfigError, DataError

from .conftest import Prepare, WriteRows, alpaca, trained_text

THREE_TURNS = Conversation(
    tuple(Message(role, f"{role} {turn}") for turn in range(3) for role in ("user", "assistant"))  # type: ignore[arg-type]
)


def encode(
    tokenizer: PreTrainedTokenizerBase,
    template: str | Template,
    conversation: Conversation,
    *,
    style: Style | None = None,
    split_special_tokens: bool = False,
    cutoff_len: int = 10_000,
    train_on_prompt: bool = False,
    mask_history: bool = False,
) -> Document:
    template = get_template(template) if isinstance(template, str) else template
    options = EncodeOptions(
        cutoff_len=cutoff_len,
        train_on_prompt=train_on_prompt,
        mask_history=mask_history,
        style=style or Style(forget_thoughts=mask_history),
    )
    tokeniser = Tokeniser(tokenizer, eos=template.eos, split_special_tokens=split_special_tokens)
    [documents] = TemplateEncoder(template, tokeniser, options)([conversation])
    assert isinstance(documents, list)
    return documents[0]


def spans(document: Document) -> int:
    """Runs of targets once labels are shifted."""
    is_target = document.labels[1:] != -100
    return int((np.diff(is_target.astype(int), prepend=0) > 0).sum())


CHATS = (
    "alpaca", "chatml", "deepseek3", "deepseekr1", "default", "gemma", "gemma2", "glm4", "gpt_oss", "llama2", "llama3",
    "kimi", "mistral", "qwen", "qwen3",
)  # fmt: skip


@pytest.mark.parametrize("name", CHATS)
def test_masked_history_trains_on_the_last_answer_and_its_end_only(
    name: str, shared_tokenizer: PreTrainedTokenizerBase
) -> None:
    # LLaMA-Factory#10827: the ends of masked answers were trained on.
    document = encode(shared_tokenizer, name, THREE_TURNS, mask_history=True)
    assert spans(document) == 1
    text = trained_text({"labels": document.labels}, shared_tokenizer)
    assert "assistant 2" in text
    assert "assistant 1" not in text
    eos = shared_tokenizer.convert_tokens_to_ids(get_template(name).eos or shared_tokenizer.eos_token)
    assert (document.labels == eos).sum() == 1


@pytest.mark.parametrize("name", CHATS)
def test_every_answer_learns_to_end(name: str, shared_tokenizer: PreTrainedTokenizerBase) -> None:
    document = encode(shared_tokenizer, name, THREE_TURNS)
    eos = shared_tokenizer.convert_tokens_to_ids(get_template(name).eos or shared_tokenizer.eos_token)
    assert (document.labels == eos).sum() == 3
    assert spans(document) == 3


def test_efficient_eos_can_train_on_prompts(shared_tokenizer: PreTrainedTokenizerBase) -> None:
    document = encode(shared_tokenizer, "glm4", THREE_TURNS, train_on_prompt=True)
    assert np.array_equal(document.labels, document.input_ids)


PARALLEL = Conversation(
    (
        Message("user", "Cold?"),
        Message("assistant", "", (ToolCall("weather", {"town": "A"}), ToolCall("weather", {"town": "B"}))),
        Message("tool", "1"),
        Message("tool", "2"),
        Message("assistant", "No."),
    )
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3", "user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>"),
        ("llama3", "ipython<|end_header_id|>\n\n1<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n2<|eot_id|>"),
        ("mistral", '[TOOL_RESULTS] {"content": 1}[/TOOL_RESULTS][TOOL_RESULTS] {"content": 2}[/TOOL_RESULTS]'),
        ("chatml", "<|im_start|>tool\n1<|im_end|>\n<|im_start|>tool\n2<|im_end|>"),
    ],
)
def test_results_of_parallel_calls_are_written_as_the_family_does(
    name: str, expected: str, shared_tokenizer: PreTrainedTokenizerBase
) -> None:
    """LLaMA-Factory joins them in Qwen's way for every family."""
    assert expected in shared_tokenizer.decode(encode(shared_tokenizer, name, PARALLEL).input_ids)
    style = Style(llamafactory=True)
    assert "</tool_response>" in shared_tokenizer.decode(
        encode(shared_tokenizer, name, PARALLEL, style=style).input_ids
    )


def test_minimax2_calls_stand_in_their_tag(tokenizer: PreTrainedTokenizerBase) -> None:
    """As its own tool prompt says; LLaMA-Factory leaves the tag out."""
    tokenizer.add_tokens(["[e~["], special_tokens=True)
    calls = (
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="town">A</parameter>\n</invoke>\n'
        '<invoke name="weather">\n<parameter name="town">B</parameter>\n</invoke>\n</minimax:tool_call>[e~['
    )
    assert calls in tokenizer.decode(encode(tokenizer, "minimax2", PARALLEL).input_ids)
    theirs = tokenizer.decode(encode(tokenizer, "minimax2", PARALLEL, style=Style(llamafactory=True)).input_ids)
    assert "<minimax:tool_call>" not in theirs
    assert "</invoke>[e~[" in theirs
    listed = Message("assistant", "", (ToolCall("weather", ["A"]),))
    with pytest.raises(RowError, match="the arguments of 'weather' are not an object"):
        get_template("minimax2").turns(Conversation((Message("user", "Cold?"), listed)), Style())


def test_families_that_go_by_another_name() -> None:
    assert get_template("gemma3") is get_template("gemma")
    assert get_template("minimax") is get_template("minimax2")


def test_text_before_a_call_is_kept(shared_tokenizer: PreTrainedTokenizerBase) -> None:
    answer = Message("assistant", "Let me look.", (ToolCall("weather", {"town": "A"}),))
    document = encode(shared_tokenizer, "qwen3", Conversation((Message("user", "Cold?"), answer)))
    assert 'Let me look.\n<tool_call>\n{"name": "weather"' in shared_tokenizer.decode(document.input_ids)


def test_glm4_tools(shared_tokenizer: PreTrainedTokenizerBase) -> None:
    call = Message("assistant", "", (ToolCall("weather", {"town": "A"}),))
    messages = (Message("user", "Cold?"), call, Message("tool", "1"), Message("assistant", "No."))
    conversation = Conversation(messages, tools=({"name": "weather", "parameters": {}},))
    document = encode(shared_tokenizer, "glm4", conversation)
    text = shared_tokenizer.decode(document.input_ids)
    assert '## weather\n\n{\n    "name": "weather",\n    "parameters": {}\n}\n在调用上述函数时' in text
    assert 'Cold?<|assistant|>weather\n{"town": "A"}<|observation|>\n1<|assistant|>\nNo.' in text
    assert spans(document) == 2


def test_tools_that_are_no_schema_spoil_their_row(prepare: Prepare, write_rows: WriteRows) -> None:
    tools = [{"name": "weather", "parameters": {"properties": ["town"]}}]
    path = write_rows([alpaca(tools=tools), alpaca()])
    report = prepare({"file_name": str(path), "columns": {"tools": "tools"}}, template="chatml").report
    assert f"{path}:1: its tools do not have the form of a JSON schema" in report


def test_thoughts(shared_tokenizer: PreTrainedTokenizerBase) -> None:
    """On: the model says itself that it does not think. Off and as is: the prompt says so, and it is not trained."""
    # Automodel#3739, LLaMA-Factory#7905: an empty thought that the prompt supplies was trained on.
    thought = Conversation((Message("user", "Hi"), Message("assistant", "<think>\nhm\n</think>\n\nHello")))
    plain = Conversation((Message("user", "Hi"), Message("assistant", "Hello")))
    empty, full = "<think>\n\n</think>\n\n", "<think>\nhm\n</think>\n\n"
    trained = {}
    for thinking in (True, False, None):
        for name, conversation in (("thought", thought), ("plain", plain)):
            document = encode(shared_tokenizer, "qwen3", conversation, style=Style(enable_thinking=thinking))
            text = trained_text({"labels": document.labels}, shared_tokenizer)
            trained[thinking, name] = text.removesuffix("<|im_end|>\n")
            assert ("<think>" in shared_tokenizer.decode(document.input_ids)) is True
    assert trained == {
        (True, "thought"): f"{full}Hello",
        (True, "plain"): f"{empty}Hello",
        (False, "thought"): "Hello",
        (False, "plain"): "Hello",
        (None, "thought"): f"{full}Hello",
        (None, "plain"): "Hello",
    }


def test_default_system(shared_tokenizer: PreTrainedTokenizerBase) -> None:
    def system(conversation: Conversation, **style: str) -> str:
        text = shared_tokenizer.decode(encode(shared_tokenizer, "chatml", conversation, style=Style(**style)).input_ids)
        return text.partition("<|im_start|>user")[0]

    named = Conversation(THREE_TURNS.messages, system="Mine.")
    assert system(THREE_TURNS) == ""
    assert system(THREE_TURNS, default_system="Be kind.") == "<|im_start|>system\nBe kind.<|im_end|>\n"
    assert system(named, default_system="Be kind.") == "<|im_start|>system\nMine.<|im_end|>\n"
    own = Template(name="own", user="{content}", default_system="Hello.")
    assert shared_tokenizer.decode(encode(shared_tokenizer, own, THREE_TURNS).input_ids).startswith("Hello.user 0")
    silenced = encode(shared_tokenizer, own, THREE_TURNS, style=Style(default_system=""))
    assert shared_tokenizer.decode(silenced.input_ids).startswith("user 0")


def test_split_special_tokens_keeps_the_datas_text_text(shared_tokenizer: PreTrainedTokenizerBase) -> None:
    # vllm#11691: a user's text that ends a turn.
    evil = Conversation((Message("user", "a<|im_end|>b"), Message("assistant", "<|im_start|>c")))
    end, start = shared_tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    as_tokens = encode(shared_tokenizer, "chatml", evil).input_ids
    assert ((as_tokens == end).sum(), (as_tokens == start).sum()) == (3, 3)
    style = Style(isolate_content=True)
    as_text = encode(shared_tokenizer, "chatml", evil, style=style, split_special_tokens=True).input_ids
    assert ((as_text == end).sum(), (as_text == start).sum()) == (2, 2)
    assert shared_tokenizer.decode(as_text) == shared_tokenizer.decode(as_tokens)


MARKERS = {
    "gpt_oss": "<|start|> <|end|> <|message|> <|channel|> <|call|>",
    "deepseek3": "<｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> "
    "<｜tool▁call▁end｜> <｜tool▁calls▁end｜> <｜tool▁outputs▁begin｜> <｜tool▁output▁begin｜> "
    "<｜tool▁output▁end｜> <｜tool▁outputs▁end｜>",
    "kimi": "<|im_system|> <|im_middle|> <|im_user|> <|im_assistant|> <|tool_calls_section_begin|> <|tool_call_begin|> "
    "<|tool_call_argument_begin|> <|tool_call_end|> <|tool_calls_section_end|>",
    "llama3": "<|start_header_id|> <|end_header_id|> <|eot_id|>",
    "mistral": "[INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
}


@pytest.mark.parametrize("name", MARKERS)
def test_split_special_tokens_leaves_the_templates_markers_tokens(
    name: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Around calls, results and schemas; in them the data's are text."""
    own = MARKERS[name].split()
    tokenizer.add_tokens([*own, "<|evil|>"], special_tokens=True)
    style, [evil] = Style(isolate_content=True), tokenizer.convert_tokens_to_ids(["<|evil|>"])

    def conversation(bad: str) -> Conversation:
        calls = [ToolCall(f"weather{bad}", {"town": f"{town}{bad}"}) for town in "AB"][: 1 if name == "gpt_oss" else 2]
        results = [Message("tool", f"{number}{bad}") for number in range(len(calls))]
        answers = Message("assistant", f"Let me look{bad}", tuple(calls)), Message("assistant", f"No{bad}")
        tools = ({"name": f"weather{bad}", "description": f"Of a town{bad}"},)
        messages = (Message("user", f"Cold{bad}?"), answers[0], *results, answers[1])
        return Conversation(messages, system=f"Hi{bad}", tools=tools)

    def markers(ids: np.ndarray) -> list[int]:
        return [int(token) for token in ids if tokenizer.convert_ids_to_tokens(int(token)) in own]

    plain = encode(tokenizer, name, conversation("")).input_ids
    assert len(markers(plain)) >= 8
    split = encode(tokenizer, name, conversation("<|evil|>"), style=style, split_special_tokens=True).input_ids
    assert evil not in split
    assert markers(split) == markers(plain)
    unsplit = encode(tokenizer, name, conversation("<|evil|>")).input_ids
    assert tokenizer.decode(split) == tokenizer.decode(unsplit)
    assert (unsplit == evil).sum() >= 7


def test_schemas_in_a_prefix_are_no_template() -> None:
    said = "{content} {bos} {eos} {tools} {date} <|im_end|>"
    messages = (Message("user", "Hi"), Message("assistant", "Hello"))
    conversation = Conversation(messages, tools=({"name": "clock", "description": said},))
    [turn] = get_template("kimi").turns(conversation, Style(isolate_content=True))
    assert turn.source[0] == "<|im_system|>tool_declare<|im_middle|>"
    assert isinstance(turn.source[1], Content)
    assert said in turn.source[1]
    assert turn.source[2].startswith("<|im_end|>")
    assert said in get_template("kimi").turns(conversation, Style())[0].source[0]
    dated = replace(conversation, tools=({"name": "clock", "default": date(2025, 1, 15)},))
    with pytest.raises(RowError, match="its tools do not have the form of a JSON schema"):
        get_template("kimi").turns(dated, Style())


def test_text_of_the_data_is_no_placeholder(shared_tokenizer: PreTrainedTokenizerBase) -> None:
    conversation = Conversation((Message("user", "{eos}{content}"), Message("assistant", "{bos}")), system="{content}")
    for name in ("default", "mistral", "deepseek3"):
        text = shared_tokenizer.decode(encode(shared_tokenizer, name, conversation).input_ids)
        assert "{eos}{content}" in text
        assert "{bos}" in text


@pytest.mark.parametrize("missing", ["bos", "eos"])
def test_a_tokenizer_without_the_special_token(missing: str, tokenizer: PreTrainedTokenizerBase) -> None:
    setattr(tokenizer, f"{missing}_token", None)
    if missing == "bos":
        with_bos = encode(tokenizer, "llama3", THREE_TURNS).input_ids
        assert tokenizer.decode(with_bos).startswith("<|start_header_id|>")
    else:
        with pytest.raises(DataError, match="no eos token"):
            encode(tokenizer, "mistral", THREE_TURNS)


def test_a_template_of_another_family(tokenizer: PreTrainedTokenizerBase) -> None:
    other = Template(name="other", user="{content}", eos="<|nowhere|>")
    with pytest.raises(DataError, match=r"no token '<\|nowhere\|>', which ends answers"):
        encode(tokenizer, other, THREE_TURNS)


def test_a_plugin_registers_a_template(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prepare: Prepare,
    write_rows: WriteRows,
    shared_tokenizer: PreTrainedTokenizerBase,
) -> None:
    (tmp_path / "house_style.py").write_text(
        "from mindspeed_llm.data.templates import Template, register_template\n"
        'register_template(Template(name="house", user="Q: {content}\\nA:", assistant=" {content}{eos}"))\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = write_rows([alpaca("Why?", "Because.")])
    data = prepare(path, template="house", model={"plugins": ["house_style"]})
    assert shared_tokenizer.decode(data.train[0]["input_ids"]) == "Q: Why?\nA: Because.<|im_end|>"
    register_template(get_template("house"))  # importing the plugin twice is fine
    with pytest.raises(ConfigError, match="a template named 'house' exists already"):
        register_template(Template(name="house", user="{content}"))


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match=r"unknown template 'lama3'. Did you mean 'llama3'\? Known: alpaca, chatml"):
        get_template("lama3")
    style = Style(tool_format="qwen2")
    with pytest.raises(ConfigError, match=r"unknown format 'qwen2'\. Known: default, qwen, llama3"):
        get_template("chatml").turns(THREE_TURNS, style)


@pytest.mark.parametrize(
    ("cutoff", "kept"),
    [
        (40, (20, 20)),  # both longer than half: in proportion
        (60, (30, 30)),
        (99, (50, 49)),
        (100, (50, 50)),
        (101, (50, 50)),
    ],
)
def test_truncation_of_equal_halves(cutoff: int, kept: tuple[int, int]) -> None:
    assert truncated_lengths(50, 50, cutoff) == kept


def test_truncation_keeps_the_short_side_whole() -> None:
    assert truncated_lengths(90, 10, 40) == (30, 10)
    assert truncated_lengths(10, 90, 40) == (10, 30)


@pytest.mark.parametrize("drop_overlong", [False, True])
def test_overlong_rows_are_cut_or_dropped_and_counted(
    drop_overlong: bool, prepare: Prepare, write_rows: WriteRows, shared_tokenizer: PreTrainedTokenizerBase
) -> None:
    # LLaMA-Factory#3995: no way to leave long rows out.
    path = write_rows([alpaca("Hi", "x " * 100), alpaca("Hi", "short")])
    data = prepare(path, template="chatml", cutoff_len=50, drop_overlong=drop_overlong)
    report = data.reports[0]
    if drop_overlong:
        assert (len(data.train), report.truncated, report.overlong) == (1, 0, 1)
        assert "1 rows left out because they are longer than cutoff_len" in data.report
    else:
        assert (len(data.train), report.truncated, report.overlong) == (2, 1, 0)
        assert len(data.train[0]["input_ids"]) == 50
        assert "1 rows cut off at cutoff_len" in data.report


def test_rows_without_anything_to_learn_are_dropped_and_counted(prepare: Prepare, write_rows: WriteRows) -> None:
    """Only the first token of a row is left, and that is never a target."""
    path = write_rows([alpaca("Hi", "There"), alpaca("Hi", "There")])
    with pytest.raises(DataError, match="2 rows left out because nothing in them would be trained on"):
        prepare(path, template="chatml", cutoff_len=1)
