"""A lean trainer for Hugging Face causal language models: FSDP2, expert and context parallelism, exact resume."""

__version__ = "0.1.0"
