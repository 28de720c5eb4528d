"""YAML files of MindSpeed LLM's FSDP2 backend: they load unchanged, or say what to use instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mindspeed_llm.config import Config
from mindspeed_llm.config.original import ORIGINAL_KEYS, UNSUPPORTED_VALUES
from mindspeed_llm.config.problems import key_paths

Load = Callable[..., Config]
Error = Callable[..., str]

# The keys, and the values that ask for nothing special, which its published fine-tuning files have.
FINE_TUNING = """\
model:
  model_id:
  model_name_or_path: model
  trust_remote_code: False
  train_from_scratch: False
  tokenizer_name_or_path: None
  init_model_with_meta_device: True
data:
  dataset: {file_name: train.jsonl}
  template: qwen3
  cutoff_len: 4096
  max_samples: 100000
  overwrite_cache: True
  preprocessing_num_workers: 1
  data_manager_type: lf
parallel:
  fsdp_size: 8
  fsdp_modules:
    - model.layers.{*}
    - model.embed_tokens
    - lm_head
  tp_size: 1
  ep_size: 1
  ep_modules:
    - model.layers.{*}.mlp.experts
  ep_fsdp_size: 1
  ep_fsdp_modules:
    - model.layers.{*}.mlp.experts
  ep_dispatcher: eager
  recompute: True
  recompute_modules:
    - model.layers.{*}
  reduce_dtype: bf16
  cp_size: 1
  cp_type: ulysses
training:
  per_device_train_batch_size: 1
  gradient_accumulation_steps: 1
  dataloader_num_workers : 1
  disable_shuffling: 1
  seed: 42
  dataloader_drop_last: True
  output_dir: ./output
  optimizer: adamw
  lr: 1.25e-06
  weight_decay: 0.0
  adam_beta1: 0.9
  adam_beta2: 0.999
  adam_epsilon: 1e-08
  max_grad_norm: 1.0
  lr_scheduler_type: cosine
  warmup_ratio: 0.0
  min_lr: 1.25e-07
  num_train_epochs: 1000
  max_steps: 2000
  save_steps: 500
  logging_steps: 1
  save_async: false
optimization:
  use_fused_rmsnorm: True
  use_fused_rotary_pos_emb: True
  moe_grouped_gemm: False
"""


def test_a_published_file_loads_unchanged(load: Load) -> None:
    config = load(yaml=FINE_TUNING)
    assert config.parallel.fsdp_modules == ["model.layers.{*}", "model.embed_tokens", "lm_head"]
    assert config.training.disable_shuffling is True
    assert config.training.adam_epsilon == 1e-8
    assert "tp_size" not in config.dump_yaml()


@pytest.mark.parametrize("key", [key for key in ORIGINAL_KEYS if not key.startswith(("inference", "data.eval"))])
def test_what_asks_for_nothing_is_accepted(key: str, load: Load) -> None:
    accepted = ORIGINAL_KEYS[key].accepted
    for value in accepted if isinstance(accepted, tuple) else ("whatever",):
        assert load(f"--{key}={value}") == load()
    assert load(f"--{key}=null") == load()


@pytest.mark.parametrize("key", [key for key, what in ORIGINAL_KEYS.items() if isinstance(what.accepted, tuple)])
def test_what_is_not_supported_says_so(key: str, error: Error) -> None:
    override = f"--{key}=surprise" if "." in key else f"--{key}.max_new_tokens=1"
    assert f"{override}: {key}: {ORIGINAL_KEYS[key].reason}" in error(override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallel.tp_size=2", "tensor parallelism is not supported; shard with parallel.fsdp_size"),
        ("inference.max_new_tokens=3", "inference: this program trains; generate with transformers"),
    ],
)
def test_the_alternative_is_named(override: str, message: str, error: Error) -> None:
    assert message in error(f"--{override}")


def test_the_table_has_no_key_that_is_one() -> None:
    keys = set(key_paths(Config))
    assert not keys & set(ORIGINAL_KEYS)
    assert {key for key, _ in UNSUPPORTED_VALUES} <= keys
