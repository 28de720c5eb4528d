"""From the ``model`` section of a configuration to a model without weights, and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from mindspeed_llm.config import ModelConfig
from mindspeed_llm.errors import ConfigError, DataError
from mindspeed_llm.models.registry import get_model_class, import_plugins
from mindspeed_llm.models.skeleton import parameters_on_meta

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


class ModelFactory:
    """Builds what ``config`` describes."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        import_plugins(config.plugins)

    def create(self) -> PreTrainedModel:
        """The model with float32 parameters on the meta device and real buffers, in training mode.

        ``load_weights`` or ``initialize_weights`` fill it, before or after it is sharded. ``model.config.dtype`` stays
        the one that config.json declares: that of the files, which the export writes again.
        Raises ConfigError or DataError when folder, class or attention implementation don't fit.
        """
        config = self._read_config()
        stored_dtype = config.dtype
        options: dict[str, Any] = {"dtype": torch.float32}
        # "mindspeed" is put into the finished model, with proof, by fuse_operators.
        if self.config.attn_implementation not in (None, "mindspeed"):
            options["attn_implementation"] = self.config.attn_implementation
        with parameters_on_meta(), _explained("model", self.config.model_name_or_path):
            if self.config.model_id is not None:
                model = get_model_class(self.config.model_id)._from_config(config, **options)
            else:
                model = AutoModelForCausalLM.from_config(
                    config, trust_remote_code=self.config.trust_remote_code, **options
                )
        model.config.dtype = stored_dtype
        if model.can_generate() and (Path(self.config.model_name_or_path) / "generation_config.json").is_file():
            with _explained("generation_config.json of", self.config.model_name_or_path):
                model.generation_config = GenerationConfig.from_pretrained(self.config.model_name_or_path)
        return model.train()

    def create_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of ``tokenizer_name_or_path``, by default the model's. Raises DataError when there is none."""
        path = self.config.tokenizer_name_or_path or self.config.model_name_or_path
        folder = _folder(path, "tokenizer_name_or_path" if self.config.tokenizer_name_or_path else "model_name_or_path")
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):  # transformers would make an empty one
            raise DataError(
                f"{folder} has no tokenizer (none of {', '.join(_TOKENIZER_FILES)}); "
                "model.tokenizer_name_or_path names the folder of one"
            )
        with _explained("tokenizer", path):
            return AutoTokenizer.from_pretrained(
                folder,
                use_fast=self.config.use_fast_tokenizer,
                trust_remote_code=self.config.trust_remote_code,
                local_files_only=True,
            )

    def _read_config(self) -> PreTrainedConfig:
        folder = _folder(self.config.model_name_or_path, "model_name_or_path")
        if not (folder / "config.json").is_file():
            raise DataError(f"model.model_name_or_path: {folder} has no config.json")
        reader: Any = AutoConfig
        options = {"trust_remote_code": self.config.trust_remote_code, "local_files_only": True}
        if self.config.model_id is not None and (own := get_model_class(self.config.model_id).config_class) is not None:
            reader, options = own, {"local_files_only": True}
        with _explained("model", folder):
            config = reader.from_pretrained(folder, **options)
        if getattr(config, "quantization_config", None) is not None:
            raise DataError(
                f"{folder / 'config.json'} has a quantization_config: quantised weights can't be trained; "
                "convert the model to bfloat16 or float32 first"
            )
        return config


def _folder(path: str, key: str) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise DataError(f"model.{key}: {path!r} is not a folder; models are read from local folders only")
    return folder


@contextmanager
def _explained(what: str, path: str | Path) -> Iterator[None]:
    """transformers tells the user's mistakes by ValueError, OSError and ImportError."""
    try:
        yield
    except (ValueError, OSError, ImportError, AssertionError) as error:  # a padding id beyond the vocabulary asserts
        kind = ConfigError if isinstance(error, ValueError) else DataError
        raise kind(f"{what} {path}: {error}") from error
