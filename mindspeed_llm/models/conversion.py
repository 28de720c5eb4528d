"""Names and layouts of checkpoint files <-> names and layouts of the model in memory, by transformers' own rules.

transformers keeps, per architecture, the transforms between the two: renamings, and converters such as "stack
``experts.*.gate_proj`` and ``experts.*.up_proj`` and concatenate them into ``experts.gate_up_proj``". They are the only
source of key names here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    apply_converters,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)

from mindspeed_llm.errors import DataError
from mindspeed_llm.models.skeleton import named_state


@dataclass(frozen=True)
class Converted:
    """A checkpoint in the model's layout."""

    tensors: dict[str, torch.Tensor]
    """By the model's names. Only of parameters and buffers that the model has."""
    unexpected: set[str]
    """Checkpoint keys for which the model has no place."""
    transforms: list[WeightTransform]
    """The transforms that this checkpoint needed; reverting them gives its layout back."""


def to_model_layout(skeleton: PreTrainedModel, checkpoint: Mapping[str, torch.Tensor]) -> Converted:
    """Rename and convert ``checkpoint``'s tensors, which may be lazy, for the model that ``skeleton`` stands for."""
    transforms = get_model_conversion_mapping(skeleton)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = named_state(skeleton)
    prefix = skeleton.base_model_prefix

    tensors: dict[str, torch.Tensor] = {}
    collected: dict[str, WeightConverter] = {}  # by the first name it makes
    unexpected: set[str] = set()
    for key in sorted(checkpoint, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = key, None  # the key is already the model's; only the base model's prefix was in question
        if name not in state:
            unexpected.add(key)
        elif pattern is None:
            tensors[name] = checkpoint[key]
        else:
            converter = collected.setdefault(name, deepcopy(by_pattern[pattern]))
            _add(converter, name, key, pattern, checkpoint[key])
    for name, converter in collected.items():
        tensors.update(_convert(converter, name, skeleton))
    return Converted(tensors, unexpected, [t for t in transforms if t.was_used()])


def from_scratch_transforms(skeleton: PreTrainedModel) -> list[WeightTransform]:
    """The transforms of a model that no checkpoint was loaded into: its export gets the architecture's usual layout."""
    transforms = get_model_conversion_mapping(skeleton, add_legacy=False)
    return [t for t in transforms if not isinstance(t, PrefixChange)]


def to_checkpoint_layout(
    skeleton: PreTrainedModel,
    transforms: Iterable[WeightTransform],
    names: Iterable[str],
    fetch: Callable[[str], torch.Tensor],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Undo ``transforms``: checkpoint keys and tensors, in order, for the model parameters ``names``.

    ``fetch`` is asked for a parameter when its turn comes, and only the parameters of one conversion (those that one
    converter joins) are held at a time.
    """
    reverse = [t.reverse_transform() for t in reversed(list(transforms))]
    renamings = [t for t in reverse if isinstance(t, WeightRenaming)]
    converters = [t for t in reverse if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}

    groups: dict[str, list[tuple[str, str]]] = {}  # first key of a conversion -> (name, pattern) of its inputs
    for name in sorted(names, key=dot_natural_key):
        key, pattern = apply_converters(name, converters)
        groups.setdefault(key, []).append((name, pattern or ""))
    for key, members in groups.items():
        name, pattern = members[0]
        if not pattern:
            yield apply_renamings(key, renamings), fetch(name)
            continue
        converter = deepcopy(by_pattern[pattern])
        for name, pattern in members:
            _add(converter, key, name, pattern, fetch(name))
        for converted_key, tensor in _convert(converter, key, skeleton).items():
            yield apply_renamings(converted_key, renamings), tensor


def _add(converter: WeightConverter, target: str, source: str, pattern: str, tensor: Any) -> None:
    """A converter takes tensors as well as the futures that transformers' own loader gives it."""
    converter.add_tensor(target, source, pattern, tensor)


def _convert(converter: WeightConverter, name: str, skeleton: PreTrainedModel) -> dict[str, torch.Tensor]:
    sources = sorted(set().union(*converter.layer_targets.values()), key=dot_natural_key)
    try:
        converted = converter.convert(name, model=skeleton, config=skeleton.config)
    except (ValueError, RuntimeError, KeyError, IndexError) as error:
        raise DataError(
            f"cannot make {name} of {sources[0]} ... {sources[-1]} ({len(sources)} tensors): {error}"
        ) from error
    return {key: value[0] if isinstance(value, list) else value for key, value in converted.items()}
