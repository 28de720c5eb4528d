"""Keys of MindSpeed LLM's FSDP2 backend that are no keys here, and why.

Values that ask for nothing are accepted, so that its YAML files load unchanged: the default of a feature that is
missing here, and whatever only refines such a feature. Any other value is an error that names the alternative.
A key leaves this table when the program learns to honour it.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any


class _Anything:
    def __contains__(self, _value: object) -> bool:
        return True


ANY = _Anything()
OFF = (False,)


@dataclass(frozen=True)
class OriginalKey:
    """What became of a key: why it is no key here, and the values that can be taken all the same."""

    reason: str
    accepted: Container[Any] = ()

    def accepts(self, value: Any) -> bool:
        return value is None or value == "None" or value in self.accepted


_LOCAL = "models and tokenizers are read from local folders; download first, for instance with `hf download`"
_FILES = "data sets are read from local files; download first and give the file or folder as file_name"
_TOKENS = "tokens are not added while training; save the extended tokenizer and model once and name that folder"
_QUANTISED = "quantised training is not supported"
_TP = "tensor parallelism is not supported; shard with parallel.fsdp_size"
_EXPERTS = "experts are found by the structure of the model"
_CHUNKS = "chunked micro-batches are not supported; use training.gradient_accumulation_steps"
_PLACEMENT = "parameters are always sharded by their first dimension"
_PROFILE = "profiles are written as text, in full"
_MODEL = "the operators of this model family are not supported"
_GDN = "linear attention has one fused implementation, see optimization.use_flash_gdn and use_fused_rmsnorm"

ORIGINAL_KEYS: dict[str, OriginalKey] = {
    "inference": OriginalKey("this program trains; generate with transformers from the exported hf/ folder"),
    # model
    "model.init_model_with_meta_device": OriginalKey("models are always loaded straight into their shards", ANY),
    "model.cache_dir": OriginalKey(_LOCAL),
    "model.model_revision": OriginalKey(_LOCAL, ("main",)),
    "model.hf_hub_token": OriginalKey(_LOCAL),
    "model.ms_hub_token": OriginalKey(_LOCAL),
    "model.om_hub_token": OriginalKey(_LOCAL),
    "model.add_tokens": OriginalKey(_TOKENS),
    "model.add_special_tokens": OriginalKey(_TOKENS),
    "model.resize_vocab": OriginalKey(_TOKENS, OFF),
    "model.new_special_tokens_config": OriginalKey(_TOKENS),
    "model.init_special_tokens": OriginalKey(_TOKENS, ANY),
    "model.quant_recipe_name": OriginalKey(_QUANTISED),
    "model.quant_apply_modules": OriginalKey(_QUANTISED, ANY),
    "model.quant_ignored_modules": OriginalKey(_QUANTISED, ANY),
    "model.quant_converters": OriginalKey(_QUANTISED, ANY),
    "model.enable_fsdp_low_precision_all_gather": OriginalKey(_QUANTISED, ANY),
    "model.fsdp_low_precision_all_gather_mode": OriginalKey(_QUANTISED, ANY),
    # data
    "data.overwrite_cache": OriginalKey(
        "prepared data is used again only if nothing that it depends on has changed", ANY
    ),
    "data.eval_num_beams": OriginalKey("evaluation computes the loss and generates nothing"),
    "data.ignore_pad_token_for_loss": OriginalKey("padding never counts in the loss", (True,)),
    "data.data_shared_file_system": OriginalKey("every rank reads the data files itself", ANY),
    "data.no_shared_storage": OriginalKey("every rank reads the data files itself", ANY),
    "data.create_attention_mask_in_dataloader": OriginalKey("attention masks are made where they are needed", ANY),
    "data.dataloader_type": OriginalKey("there is one kind of loader", ("single",)),
    "data.append_eod": OriginalKey("a document always ends with the end-of-text token", ANY),
    # parallel
    "parallel.tp_size": OriginalKey(_TP, (1,)),
    "parallel.tp_colwise": OriginalKey(_TP, ANY),
    "parallel.tp_rowwise": OriginalKey(_TP, ANY),
    "parallel.ep_modules": OriginalKey(_EXPERTS, ANY),
    "parallel.ep_fsdp_modules": OriginalKey(_EXPERTS, ANY),
    "parallel.shard_placement_fn": OriginalKey(_PLACEMENT),
    "parallel.efsdp_shard_placement_fn": OriginalKey(_PLACEMENT, ANY),
    "parallel.fsdp_implementation": OriginalKey("PyTorch's fully_shard is the only implementation", ("native",)),
    "parallel.hook_modules": OriginalKey("PyTorch's fully_shard sets its own hooks", ANY),
    "parallel.enable_chunk_batch": OriginalKey(_CHUNKS, OFF),
    "parallel.chunk_mbs": OriginalKey(_CHUNKS, ANY),
    "parallel.chunk_mbs_batch_dim": OriginalKey(_CHUNKS, ANY),
    "parallel.chunk_mbs_modules": OriginalKey(_CHUNKS, ANY),
    "parallel.chunk_mbs_arg_indexs": OriginalKey(_CHUNKS, ANY),
    "parallel.chunk_mbs_kwarg_names": OriginalKey(_CHUNKS, ANY),
    # training
    "training.calculate_per_token_loss": OriginalKey("the loss is always the mean over all targets of a step", ANY),
    "training.log_throughput": OriginalKey("speed and MFU are always logged", ANY),
    "training.log_cpu_memory": OriginalKey("use a monitor of the system", OFF),
    "training.indexer_loss_coeff": OriginalKey(_MODEL, ANY),
    "training.mtp_loss_scaling_factor": OriginalKey("multi-token prediction is not supported", ANY),
    "training.dataloader_prefetch_factor": OriginalKey("batches are put together ahead of time anyway", ANY),
    "training.dataloader_pin_memory": OriginalKey("batches are pinned where the device profits", ANY),
    "training.dataloader_persistent_workers": OriginalKey("workers live as long as they are needed", ANY),
    "training.save_async": OriginalKey("asynchronous checkpoints are not supported yet", OFF),
    "training.save_epochs": OriginalKey("use training.save_steps", (1,)),
    "training.profile_export_type": OriginalKey(_PROFILE, ANY),
    "training.profile_data_simplification": OriginalKey(_PROFILE, ANY),
    # optimization
    "optimization.use_sparse_flash_attn": OriginalKey(_MODEL, OFF),
    "optimization.use_fused_lightning_indexer": OriginalKey(_MODEL, OFF),
    "optimization.use_fused_lightning_indexer_loss": OriginalKey(_MODEL, OFF),
    "optimization.use_ascend_mhc": OriginalKey(_MODEL, OFF),
    "optimization.use_triton_swiglu_limit": OriginalKey(_MODEL, OFF),
    "optimization.pre_tokens": OriginalKey(_MODEL, ANY),
    "optimization.next_tokens": OriginalKey(_MODEL, ANY),
    "optimization.use_triton_gdn": OriginalKey(_GDN, OFF),
    "optimization.use_triton_rmsnormgated": OriginalKey(_GDN, OFF),
    "optimization.gdn_chunk_size": OriginalKey(_GDN, ANY),
}

_OF_A_DATASET = {
    "ranking": OriginalKey("preference pairs need a preference loss, which this trainer does not have", OFF),
    "split": OriginalKey(_FILES, ("train",)),
    "subset": OriginalKey(_FILES),
    "folder": OriginalKey(_FILES),
    "script_url": OriginalKey(_FILES),
    "cloud_file_name": OriginalKey(_FILES),
    "hf_hub_url": OriginalKey(_FILES),
    "ms_hub_url": OriginalKey(_FILES),
    "om_hub_url": OriginalKey(_FILES),
}
ORIGINAL_KEYS |= {
    f"data.{name}.{key}": what for name in ("dataset", "eval_dataset") for key, what in _OF_A_DATASET.items()
}

UNSUPPORTED_VALUES: dict[tuple[str, Any], str] = {
    ("parallel.cp_type", "kvallgather"): "the attention of its model is not supported; use ulysses, ring or hybrid",
    ("parallel.param_dtype", "fp16"): "float16 gradients need loss scaling, which is not supported; bf16 needs none",
}
"""Values, planned or the original's, of keys that exist here."""
