"""A Hugging Face checkpoint straight into a sharded model: every rank reads only the parts that it holds."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key
from transformers.utils.loading_report import LoadStateDictInfo

from mindspeed_llm.errors import DataError
from mindspeed_llm.models.conversion import Converted, to_model_layout
from mindspeed_llm.models.files import open_checkpoint
from mindspeed_llm.models.lazy_tensor import LazyTensor
from mindspeed_llm.models.skeleton import local_part, materialize, named_state, skeleton


@torch.no_grad()
def load_weights(model: PreTrainedModel, folder: str | Path, device: torch.device | str | None = None) -> None:
    """Fill ``model`` with the safetensors checkpoint in ``folder``.

    Parameters may be on the meta device (they are then made on ``device``, by default their mesh's) or real, plain or
    DTensors of any rectangular sharding. A rank reads the bytes of its own shards and nothing else, one tensor at a
    time, cast to the parameter's dtype; experts that live elsewhere are never opened. Shared parameters stay one.
    No communication.

    Raises DataError that names the keys when the checkpoint lacks a tensor, has one that the model doesn't know, or one
    of another shape, all before anything is read; and when a file is damaged.
    """
    template = skeleton(model)
    with open_checkpoint(folder) as checkpoint:
        converted = to_model_layout(template, checkpoint)
        _check(model, template, converted, folder)
        materialize(model, device)
        filled: dict[int, str] = {}
        for name, target in sorted(named_state(model).items(), key=lambda item: dot_natural_key(item[0])):
            source = converted.tensors.get(name)
            if source is None:
                continue
            if id(target) in filled:
                _check_tied(source, target, name, filled[id(target)], folder)
                continue
            assert isinstance(source, LazyTensor)
            local, box = local_part(target)
            source.read(box, local)
            filled[id(target)] = name
    # transformers' own place for them: save_pretrained and our export write the same layout again.
    model.__dict__["_weight_conversions"] = converted.transforms


def check_weights(model: PreTrainedModel, folder: str | Path) -> None:
    """Raise what ``load_weights`` would before it reads any data."""
    template = skeleton(model)
    with open_checkpoint(folder) as checkpoint:
        _check(model, template, to_model_layout(template, checkpoint), folder)


def _check(model: PreTrainedModel, template: PreTrainedModel, converted: Converted, folder: str | Path) -> None:
    state = named_state(model)
    available = {id(tensor) for name, tensor in state.items() if name in converted.tensors}
    absent = {name: tensor for name, tensor in state.items() if id(tensor) not in available}
    buffers = {name for name, tensor in absent.items() if not isinstance(tensor, torch.nn.Parameter)}
    info = LoadStateDictInfo(buffers, set(converted.unexpected), set(), [], {}, set())
    template._adjust_missing_and_unexpected_keys(info)  # the architecture's own exceptions: MTP layers, ...
    missing = (absent.keys() - buffers) | info.missing_keys
    wrong = [
        f"{name} is {list(converted.tensors[name].shape)} in the checkpoint, {list(tensor.shape)} in the model"
        for name, tensor in state.items()
        if name in converted.tensors and converted.tensors[name].shape != tensor.shape
    ]
    problems = [
        _list("missing in the checkpoint", sorted(missing, key=dot_natural_key)),
        _list("unknown to the model", sorted(info.unexpected_keys, key=dot_natural_key)),
        _list("of another shape", wrong),
    ]
    if any(problems):
        kind = type(template).__name__
        raise DataError(f"{folder} doesn't fit {kind}:\n" + "\n".join(p for p in problems if p))


def _check_tied(source: torch.Tensor, target: torch.Tensor, name: str, first: str, folder: str | Path) -> None:
    """A checkpoint may hold a tied weight under both names, provided that both are the same."""
    assert isinstance(source, LazyTensor)
    local, box = local_part(target)
    again = torch.empty_like(local)
    source.read(box, again)
    if not torch.equal(again, local):
        raise DataError(
            f"{folder}: {name} and {first} differ, but config.json ties them; set tie_word_embeddings to false there"
        )


def _list(what: str, entries: list[str], limit: int = 10) -> str:
    if not entries:
        return ""
    more = [f"... and {len(entries) - limit} more"] if len(entries) > limit else []
    return "\n    ".join([f"{len(entries)} {what}:", *entries[:limit], *more])
