"""Chat templates by name, the package's own and those that plugins register."""

from __future__ import annotations

import difflib

from mindspeed_llm.data.templates.builtin import ALIASES, BUILTIN, THINK
from mindspeed_llm.data.templates.template import Content, Piece, SpecialToken, Style, Template, Thinking, Turn
from mindspeed_llm.errors import ConfigError

__all__ = [
    "THINK",
    "Content",
    "Piece",
    "SpecialToken",
    "Style",
    "Template",
    "Thinking",
    "Turn",
    "get_template",
    "register_template",
]

_TEMPLATES = {template.name: template for template in BUILTIN}
_TEMPLATES |= {alias: _TEMPLATES[name] for alias, name in ALIASES.items()}


def register_template(template: Template) -> None:
    """Make ``data.template: <template.name>`` known. Call it in a module that ``model.plugins`` names."""
    known = _TEMPLATES.setdefault(template.name, template)
    if known != template:
        raise ConfigError(f"a template named {template.name!r} exists already; choose another name")


def get_template(name: str) -> Template:
    """The template of that name; raises ``ConfigError`` with the known and the nearest names."""
    if name in _TEMPLATES:
        return _TEMPLATES[name]
    near = difflib.get_close_matches(name, _TEMPLATES, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"data.template: unknown template {name!r}.{hint} Known: {', '.join(sorted(_TEMPLATES))}. "
        "Leave the key out to use the tokenizer's own chat template."
    )
