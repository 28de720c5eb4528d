"""``python -m mindspeed_llm.config`` prints every key: the page ``docs/configuration.md``."""

from mindspeed_llm.config.reference import markdown

print(markdown(), end="")
