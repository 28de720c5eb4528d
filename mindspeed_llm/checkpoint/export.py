"""The trained model as a Hugging Face folder, in the layout of the checkpoint that it came from."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save

from mindspeed_llm.checkpoint.durable import fsync
from mindspeed_llm.checkpoint.safetensors_writer import write_sharded
from mindspeed_llm.models.conversion import from_scratch_transforms, to_checkpoint_layout
from mindspeed_llm.models.skeleton import named_state, original_class, skeleton


@torch.no_grad()
def export_hf(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    end_of_answers: int | None = None,
    max_file_bytes: int = 5 * 2**30,
) -> None:
    """Write config.json, generation_config.json, tokenizer and safetensors to ``folder``. Collective.

    Names and shapes are those of the checkpoint that ``load_weights`` read (one tensor per expert, no ``lm_head`` when
    it is tied, ...), or the architecture's usual ones for a model trained from scratch. Values are cast to ``dtype``,
    by default what config.json declares, float32 when it declares nothing; what the architecture keeps in float32
    stays float32. Generation ends where the model's own does, or else at the tokenizer's end of text, and at the token
    ``end_of_answers`` that the model was trained to end with. Tensors are gathered and written one conversion (a
    layer's stacked experts, say) at a time: no rank ever holds the model. ``folder`` appears, or is replaced, when
    everything has been written.
    """
    folder = Path(folder)
    template = skeleton(model)
    dtype = dtype or _declared_dtype(model.config)
    transforms = model.__dict__.get("_weight_conversions")
    if transforms is None:
        transforms = from_scratch_transforms(template)
    exported, is_main = _exported(model, template, dtype), dist.get_rank() == 0

    def converted(fetch: Callable[[str], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        return to_checkpoint_layout(template, transforms, exported, fetch)

    def announce(name: str) -> torch.Tensor:
        tensor, dtype = exported[name]
        return torch.empty(tensor.shape, dtype=dtype, device="meta")

    def gather(name: str) -> torch.Tensor:
        tensor, dtype = exported[name]
        tensor = tensor.detach().to(dtype)
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        return tensor.cpu() if is_main else announce(name)  # the other ranks only take part in the gathering

    if is_main:
        temporary = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        write_sharded(temporary, list(converted(announce)), converted(gather), max_file_bytes)
        _write_metadata(model, template, tokenizer, temporary, dtype, end_of_answers)
        _publish(temporary, folder)
    else:
        for _ in converted(gather):
            pass
    dist.barrier()


def _declared_dtype(config: PreTrainedConfig) -> torch.dtype:
    declared = config.dtype or torch.float32
    return getattr(torch, declared) if isinstance(declared, str) else declared


def _exported(
    model: PreTrainedModel, template: PreTrainedModel, dtype: torch.dtype
) -> dict[str, tuple[torch.Tensor, torch.dtype]]:
    """What is written, by the model's names, and in which dtype. A tied weight is written under its source's name."""
    left_out = {*template.all_tied_weights_keys, *(template._keys_to_ignore_on_save or ())}
    patterns = {*(template._keep_in_fp32_modules_strict or ())}
    if dtype == torch.float16:
        patterns |= {*(template._keep_in_fp32_modules or ())}
    in_float32 = re.compile("|".join(rf"(^|\.){pattern}($|\.)" for pattern in patterns) or "$^")
    exported = {}
    for name, tensor in named_state(model).items():
        if name in left_out:
            continue
        castable = isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point()
        exported[name] = (tensor, dtype if castable and not in_float32.search(name) else tensor.dtype)
    return exported


def _write_metadata(
    model: PreTrainedModel,
    template: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    dtype: torch.dtype,
    end_of_answers: int | None,
) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [original_class(model).__name__]
    config.dtype = dtype
    if template._auto_class is not None:  # a model whose code came with its folder takes the code along
        custom_object_save(template, str(folder), config=cast(Any, config))
    config.save_pretrained(folder)
    if model.can_generate():
        generation = copy.deepcopy(model.generation_config)
        generation.eos_token_id = _ends(generation.eos_token_id, tokenizer, end_of_answers)
        # not save_pretrained: it refuses settings that the original's own file may have
        generation.to_json_file(folder / "generation_config.json")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _ends(
    own: int | list[int] | None, tokenizer: PreTrainedTokenizerBase | None, end_of_answers: int | None
) -> int | list[int] | None:
    """The tokens at which generation ends: without one of them nothing would end what the model says."""
    if own is None and tokenizer is not None:
        own = cast("int | None", tokenizer.eos_token_id)
    if end_of_answers is None or end_of_answers == own:
        return own
    if own is None:
        return end_of_answers
    known = own if isinstance(own, list) else [own]
    return known if end_of_answers in known else [*known, end_of_answers]


def _publish(temporary: Path, folder: Path) -> None:
    for path in (*temporary.rglob("*"), temporary):
        fsync(path)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    fsync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
