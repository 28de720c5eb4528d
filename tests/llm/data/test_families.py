"""Our templates write what the chat templates that come with the models write, tools and all.

`families.json` holds what those made of fixed conversations. LLaMA-Factory's differ: see docs/parity.md.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerBase

from mindspeed_llm.data.conversation import Conversation, Message, RowError, ToolCall
from mindspeed_llm.data.encode import EncodeOptions, TemplateEncoder
from mindspeed_llm.data.templates import SpecialToken, Style, Template, get_template
from mindspeed_llm.data.tokenise import Tokeniser

from .conftest import ORACLES, TODAY, Prepare, WriteRows, trained_text

RECORDED = json.loads((ORACLES / "families.json").read_text(encoding="utf-8"))
CASES = [(family, case) for family, entry in RECORDED["families"].items() for case in entry["texts"]]
STYLE = Style(enable_thinking=None, forget_thoughts=True, today=TODAY)  # a chat forgets the thoughts of earlier answers

PLAIN = Conversation((Message("user", "Hi"), Message("assistant", "Hello.")))


def conversation(name: str, template: Template) -> Conversation:
    recorded = RECORDED["conversations"][name]
    messages, system = [], ""
    for turn in recorded["messages"]:
        if turn["role"] == "system":
            system = turn["content"]
            continue
        content, thinking = turn["content"], template.thinking
        if turn.get("thought") and thinking:
            content = f"{thinking.opening}{turn['thought']}{thinking.closing}{content}"
        calls = (call["function"] for call in turn.get("tool_calls", ()))
        messages.append(Message(turn["role"], content, tuple(ToolCall(c["name"], c["arguments"]) for c in calls)))
    return Conversation(tuple(messages), system, tuple(RECORDED["tools"]) if recorded["has_tools"] else ())


def written(template: Template, name: str, bos: str, eos: str, style: Style = STYLE) -> str:
    turns = template.turns(conversation(name, template), style)
    special = {"bos": bos, "eos": eos}
    pieces = [piece for turn in turns for piece in (*turn.source, *turn.target)]
    text = "".join(special[piece] if isinstance(piece, SpecialToken) else piece for piece in pieces)
    return text + (eos if turns[-1].ends_behind else "")


@pytest.mark.parametrize(("family", "case"), CASES, ids=lambda value: value.replace(" ", "-"))
def test_text_is_that_of_the_model_s_own_template(family: str, case: str) -> None:
    # LLaMA-Factory#6744: a tool prompt that is not the model's; #10774, #10777: a system prompt that is not.
    entry = RECORDED["families"][family]
    expected = entry["texts"][case]
    if family == "deepseek3" and RECORDED["conversations"][case]["has_tools"]:  # V3's own does not describe tools
        described = written(get_template(family), case, entry["bos"], entry["eos"])
        prompt, found, rest = described.partition("<｜User｜>")
        assert prompt.startswith(
            "<｜begin▁of▁sentence｜>## Tools\nYou have access to the following tools:\n\n### weather\n"
        )
        assert entry["bos"] + found + rest == expected
        return
    assert written(get_template(family), case, entry["bos"], entry["eos"]) == expected


def test_calls_and_results_of_deepseek() -> None:
    text = written(get_template("deepseek3"), "two calls", "", "<eos>")
    assert (
        "Cold?<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        '```json\n{"town": "A"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n'
        '```json\n{"town": "B"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><eos>'
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>1<｜tool▁output▁end｜>\n"
        "<｜tool▁output▁begin｜>2<｜tool▁output▁end｜><｜tool▁outputs▁end｜>No.<eos>"
    ) in text


def test_calls_and_results_of_kimi() -> None:
    text = written(get_template("kimi"), "two calls", "", "")
    tools = json.dumps(RECORDED["tools"], ensure_ascii=False)
    assert text == (
        f"<|im_system|>tool_declare<|im_middle|>{tools}<|im_end|>"
        "<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>"
        "<|im_user|>user<|im_middle|>Cold?<|im_end|><|im_assistant|>assistant<|im_middle|><|tool_calls_section_begin|>"
        '<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"town": "A"}<|tool_call_end|>'
        '<|tool_call_begin|>functions.weather:1<|tool_call_argument_begin|>{"town": "B"}<|tool_call_end|>'
        "<|tool_calls_section_end|><|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of functions.weather:0\n1<|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of functions.weather:1\n2<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>No.<|im_end|>"
    )
    later = written(get_template("kimi"), "system and tool", "", "")
    assert "functions.weather:0<" in later
    assert "functions.clock:1<" in later


@pytest.mark.parametrize("family", ["gpt_oss", "kimi"])
def test_a_result_of_no_call_spoils_its_row(family: str) -> None:
    call = Message("assistant", "", (ToolCall("clock", {}),))
    turns = (Message("user", "Time?"), call, Message("tool", "1"), Message("tool", "2"), Message("assistant", "Noon."))
    with pytest.raises(RowError, match="there are 2 results of 1 tool calls"):
        get_template(family).turns(Conversation(turns), STYLE)


def test_several_calls_at_once_are_no_harmony() -> None:
    template = get_template("gpt_oss")
    with pytest.raises(RowError, match="harmony tool format has no way to write several calls at once"):
        template.turns(conversation("two calls", template), STYLE)


@pytest.mark.parametrize("thinking", [True, False, None])
def test_harmony_trains_what_the_model_has_to_write(
    thinking: bool | None, prepare: Prepare, write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Channels, calls with their end, and answers with theirs: `<|return|>`, in whose place history shows `<|end|>`."""
    tokenizer.add_tokens(["<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|message|>", "<|channel|>"], True)
    tokenizer.eos_token = "<|return|>"
    turns = [("human", "Time?"), ("function_call", '{"name": "clock", "arguments": {}}'), ("observation", "noon")]
    turns += [("gpt", "Noon."), ("human", "Bye"), ("gpt", "See you.")]
    rows = [{"conversations": [{"from": role, "value": text} for role, text in turns]}]
    entry = {"file_name": str(write_rows(rows)), "formatting": "sharegpt"}
    data = prepare(entry, template="gpt_oss", tokenizer=tokenizer, enable_thinking=thinking, cutoff_len=512)
    assert trained_text(data.train[0], tokenizer) == (
        " to=functions.clock<|channel|>commentary json<|message|>{}<|call|>"
        "<|channel|>final<|message|>Noon.<|return|><|channel|>final<|message|>See you.<|return|>"
    )
    shown = tokenizer.decode(data.train[0]["input_ids"])
    assert "Noon.<|end|><|start|>user<|message|>Bye<|end|>" in shown
    assert shown.endswith("See you.<|return|>")
    assert "Current date: 2025-01-15" in shown
    last = prepare(entry, template="gpt_oss", tokenizer=tokenizer, mask_history=True, cutoff_len=512)
    assert trained_text(last.train[0], tokenizer) == "<|channel|>final<|message|>See you.<|return|>"


def test_text_beside_a_harmony_call_is_a_thought() -> None:
    template = get_template("gpt_oss")
    assert template.thinking
    for said in ("Let me look.", f"{template.thinking.opening}Let me look.{template.thinking.closing}"):
        answer = Message("assistant", said, (ToolCall("clock", {}),))
        [turn] = template.turns(Conversation((Message("user", "Time?"), answer)), STYLE)
        assert "".join(turn.target) == (
            "<|channel|>analysis<|message|>Let me look.<|end|><|start|>assistant"
            " to=functions.clock<|channel|>commentary json<|message|>{}<|call|>"
        )
        assert not turn.ends_behind


STRING, NUMBER, OBJECT = {"type": "string"}, {"type": "number"}, {"type": "object"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"oneOf": [OBJECT, NUMBER]}, "object | \nnumber"),
        ({"oneOf": [STRING | {"description": "D"}, NUMBER | {"default": 1}], "default": "q"},
         f"string// D | \nnumber{' ' * 20}// default: 1// default: q"),
        ({"oneOf": [STRING | {"description": "D", "default": "é<"}, NUMBER]},
         f'string// D{" " * 20}// default: "é<" | \nnumber'),
        ({"oneOf": [STRING], "enum": ["q"], "default": "q"}, "string, // default: q"),
        (STRING | {"default": "é<"}, 'string, // default: "é<"'),
        ({"type": "array", "items": {"type": ["object", "object"]}}, "any[]"),
        ({"type": "array", "items": {"oneOf": [OBJECT, OBJECT]}}, "object | \nobject[]"),
        ({"type": []}, "any"),
        ({"type": [], "oneOf": [STRING]}, "string"),
        ({"type": ["string", "null"]}, "string | null"),
        ({"type": "object", "properties": {"b": {"oneOf": [STRING | {"default": 1}, NUMBER]}}},
         f"{{\nb?: \n{' ' * 16}string{' ' * 20}// default: 1 | \nnumber}}"),
    ],
)  # fmt: skip
def test_types_are_those_of_the_harmony_template(schema: dict[str, object], expected: str) -> None:
    """What gpt-oss's own chat template made of these schemas."""
    tool = {"name": "f", "description": "", "parameters": {"properties": {"a": schema}}}
    [turn] = get_template("gpt_oss").turns(replace(PLAIN, tools=(tool,)), STYLE)
    assert f"type f = (_: {{\na?: {expected},\n}}) => any;" in "".join(turn.source)


def test_a_schema_too_deep_to_write_spoils_its_row() -> None:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(1000):
        schema = {"type": "object", "properties": {"a": schema}}
    tool = {"name": "f", "parameters": schema}
    with pytest.raises(RowError, match="its tools do not have the form of a JSON schema"):
        get_template("gpt_oss").turns(replace(PLAIN, tools=(tool,)), STYLE)


@pytest.mark.parametrize("family", ["qwen3", "llama3", "mistral", "kimi", "gpt_oss", "glm4"])
def test_a_tool_may_be_wrapped_without_its_type(family: str) -> None:
    tool = {"name": "clock", "description": "The time.", "parameters": {}}
    texts = set()
    for given in (tool, {"function": tool}, {"type": "function", "function": tool}):
        turns = get_template(family).turns(replace(PLAIN, tools=(given,)), STYLE)
        texts.add("".join(turns[0].source))
    assert len(texts) == 1


def test_llamafactory_writes_its_own(shared_tokenizer: PreTrainedTokenizerBase) -> None:
    """By parity: ReAct calls for DeepSeek and gpt-oss, blank lines where Qwen has no system prompt."""
    style = Style(enable_thinking=None, forget_thoughts=True, today=TODAY, llamafactory=True)
    for family, ours, theirs in (
        ("deepseek3", "<｜tool▁call▁begin｜>", "Action: weather\nAction Input: {"),
        ("gpt_oss", "to=functions.weather", "Action: weather\nAction Input: {"),
        ("qwen3", "system\n# Tools", "system\n\n\n# Tools"),
    ):
        template = get_template(family)
        texts = [written(template, "tool", "", "", style) for style in (STYLE, style)]
        assert [ours in text for text in texts] == [True, False]
        assert [theirs in text for text in texts] == [False, True]


def test_a_prompt_that_tells_the_date_is_prepared_anew(
    prepare: Prepare, shared_tokenizer: PreTrainedTokenizerBase
) -> None:
    assert get_template("gpt_oss").is_dated
    assert not get_template("qwen3").is_dated
    options = EncodeOptions(cutoff_len=1000, style=STYLE)
    encode = TemplateEncoder(get_template("gpt_oss"), Tokeniser(shared_tokenizer), options)
    [documents] = encode([PLAIN])
    assert not isinstance(documents, RowError)
    assert "Current date: 2025-01-15" in shared_tokenizer.decode(documents[0].input_ids)
