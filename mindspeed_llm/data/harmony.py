"""Tools in harmony, the format of gpt-oss: TypeScript declarations, and calls in a channel of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import Any

from mindspeed_llm.data.conversation import Content, RowError, ToolCall
from mindspeed_llm.data.tool_format import Tool, ToolFormat, Written, function_of, to_json

# Its chat template was indented, and the model learnt from what came of it.
_MODEL_S_OWN_BREAK = "\n" + " " * 16
_MODEL_S_OWN_SPACE = " " * 20
_SIMPLE = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}


def _describe(tools: Sequence[Tool], today: date) -> str:
    declarations = "".join(f"{_declaration(function_of(tool))}\n\n" for tool in tools)
    return f"# Tools\n\n## functions\n\nnamespace functions {{\n\n{declarations}}} // namespace functions"


def _declaration(tool: Tool) -> str:
    parameters = tool.get("parameters") or {}
    properties, required = parameters.get("properties") or {}, parameters.get("required") or []
    lines = [line for name, schema in properties.items() for line in _property(name, schema, name in required)]
    arguments = "\n".join(["_: {", *lines, "}"]) if properties else ""
    return f"// {tool.get('description', '')}\ntype {tool['name']} = ({arguments}) => any;"


def _property(name: str, schema: Mapping[str, Any], is_required: bool) -> Iterator[str]:
    if schema.get("description"):
        yield f"// {schema['description']}"
    comment = ""
    if "default" in schema:
        is_raw = schema.get("enum") or schema.get("oneOf")
        comment = f"// default: {schema['default'] if is_raw else to_json(schema['default'])}"
        if schema.get("enum") or not is_raw:
            comment = f", {comment}"
    yield f"{name}{'' if is_required else '?'}: {_type(schema)}{comment},"


def _type(schema: Mapping[str, Any]) -> str:
    kind, null = schema.get("type"), " | null" if schema.get("nullable") else ""
    if kind == "array":
        items = schema.get("items") or {}
        inner = _SIMPLE.get(str(items.get("type"))) or (_type(items) if items else "any")
        return ("any" if inner == "object | object" or len(inner) > 50 else inner) + "[]" + null
    if isinstance(kind, list) and kind:
        return " | ".join(kind)
    if schema.get("oneOf"):
        return " | \n".join(map(_variant, schema["oneOf"]))
    if kind == "string":
        return " | ".join(f'"{value}"' for value in schema["enum"]) if schema.get("enum") else "string" + null
    if kind == "object" and schema.get("properties"):
        required = schema.get("required") or []
        parts = (
            f"{name}{'' if name in required else '?'}: {_MODEL_S_OWN_BREAK}{_type(part)}"
            for name, part in schema["properties"].items()
        )
        return "{\n" + ", ".join(parts) + "}"
    return "object" if kind == "object" else _SIMPLE.get(str(kind), "any")


def _variant(schema: Mapping[str, Any]) -> str:
    description = f"// {schema['description']}" if schema.get("description") else ""
    default = f"{_MODEL_S_OWN_SPACE}// default: {to_json(schema['default'])}" if "default" in schema else ""
    return f"{_type(schema)}{description}{default}"


def _call(calls: Sequence[ToolCall]) -> Written:
    if len(calls) > 1:
        raise RowError("the harmony tool format has no way to write several calls at once")
    name, arguments = Content(calls[0].name), Content(to_json(calls[0].arguments))
    return [" to=functions.", name, "<|channel|>commentary json<|message|>", arguments, "<|call|>"]


def _result(call: ToolCall, text: str) -> Written:
    channel = " to=assistant<|channel|>commentary<|message|>"
    return ["functions.", Content(call.name), channel, Content(to_json(text))]


HARMONY = ToolFormat(
    "harmony",
    _describe,
    _call,
    announce=lambda tools: ["\nCalls to these tools must go to the commentary channel: 'functions'."],
    beside=lambda text: ["<|channel|>analysis<|message|>", Content(text), "<|end|><|start|>assistant"],
    result=_result,
)
