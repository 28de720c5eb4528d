"""Makes a model context parallel, or says what in it cannot be."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from mindspeed_llm.errors import ConfigError
from mindspeed_llm.models.skeleton import original_class
from mindspeed_llm.parallel.context.attention import NAME, ContextAttention
from mindspeed_llm.parallel.context.linear_attention import ContextMixing, functions_of, reach_over_ranks
from mindspeed_llm.parallel.context.mixer_probe import NotTokenwiseError, probe
from mindspeed_llm.parallel.context.positions import LastPosition, PositionsProbe
from mindspeed_llm.parallel.context.router_logits import gather_router_logits
from mindspeed_llm.parallel.structure import decoder_layers

# What documents and a window can express, without a mask; and layers whose mixers have been probed.
_EXPRESSIBLE = {"full_attention", "sliding_attention", "linear_attention", "conv"}


def apply_context_parallel(model: PreTrainedModel, mesh: DeviceMesh | None) -> None:
    """Let the attention of ``model`` reach over the ranks of ``mesh`` ``(batch, ring, ulysses)``; None: as it is.

    The model is then called with what :func:`~mindspeed_llm.batch.to_device` makes of a batch that ``ContextSharder``
    has cut. Its first call proves that every attention module did exchange with other ranks, and that position ids,
    which only the whole sequence could tell, were used, or that the model has no use for any.

    Raises ConfigError, here or at the first call, that names the module which cannot be context parallel.
    """
    if mesh is None:
        return
    attend = ContextAttention(mesh)
    modules, mixers = _attention_modules(model), _mixers(model)
    _check(model, modules, mixers, attend.ulysses.size())
    _check_mixers(model, mixers, attend.ring.size() * attend.ulysses.size())
    for mixer in mixers.values():
        reach_over_ranks(mixer, ContextMixing(attend))
    model.set_attn_implementation(NAME)
    for name, module in modules.items():
        if module.config._attn_implementation != NAME:  # type: ignore[union-attr]
            raise _error(name, module, "does not let its attention implementation be set")
        module.context_parallel = attend  # type: ignore[assignment]
    positions, last = PositionsProbe(model), LastPosition(model, attend)
    model.register_forward_pre_hook(_begin(attend, positions, last), with_kwargs=True)
    model.register_forward_hook(_finish(attend, positions, modules))
    model.base_model.register_forward_hook(gather_router_logits(attend))


def _attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules whose forward calls transformers' attention interface, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if "ALL_ATTENTION_FUNCTIONS" in getattr(inspect.unwrap(type(module).forward), "__code__", _no_code).co_names
    }


_no_code = compile("", "", "exec")


def _mixers(model: nn.Module) -> dict[str, nn.Module]:
    """Modules of linear attention whose forward calls a convolution or a delta rule of transformers, by name."""
    return {name: module for name, module in model.named_modules() if functions_of(module)}


def _check(
    model: PreTrainedModel, attention: dict[str, nn.Module], mixers: dict[str, nn.Module], ulysses_size: int
) -> None:
    config = model.config.get_text_config()
    names = {module: name for name, module in model.named_modules()}
    convolutions = {child for mixer in mixers.values() for child in mixer.children()}
    for layer in decoder_layers(model):
        inside = list(layer.modules())
        for module in inside:
            if isinstance(module, nn.Conv1d) and module not in convolutions:
                raise _error(names[module], module, "mixes neighbouring tokens outside of attention")
        if not any(module in inside for module in [*attention.values(), *mixers.values()]):
            raise _error(names[layer], layer, "has no attention that goes through transformers' attention interface")
    for kind in getattr(config, "layer_types", None) or []:
        if kind not in _EXPRESSIBLE:
            raise _error("model", model, f"has layers of the type {kind}")
    if not model._supports_flash_attn:
        raise _error("model", model, "has attention that only a mask can express (it does not support flash attention)")
    for name, module in attention.items():
        if getattr(module, "attention_dropout", 0.0):
            raise _error(name, module, f"has attention_dropout {module.attention_dropout}, which is not supported")
    if config.num_attention_heads % ulysses_size:
        raise ConfigError(
            f"parallel.cp_type: {config.num_attention_heads} attention heads cannot be divided among {ulysses_size} "
            "ranks; use cp_type: ring, or hybrid with an ulysses_size that divides them"
        )


def _check_mixers(model: PreTrainedModel, mixers: dict[str, nn.Module], num_ranks: int) -> None:
    """Raise for one that mixes tokens in other ways, too, or whose heads the ranks cannot share."""
    hidden_size, heads = model.config.get_text_config().hidden_size, dict[Hashable, int | None]()
    for name, mixer in mixers.items():
        kind = (type(mixer), tuple(parameter.shape for parameter in mixer.parameters()))
        try:
            if kind not in heads:
                heads[kind] = probe(mixer, hidden_size)
        except NotTokenwiseError as why:
            raise _error(name, mixer, str(why)) from why
        number = heads[kind]
        if number is not None and number % num_ranks:
            raise ConfigError(
                f"parallel.cp_size: {number} value heads in {name} cannot be divided among {num_ranks} ranks "
                f"({number} = {number // num_ranks} · {num_ranks} + {number % num_ranks}); choose a divisor of {number}"
            )


def _error(name: str, module: nn.Module, why: str) -> ConfigError:
    kind = original_class(module) if isinstance(module, PreTrainedModel) else type(module)
    return ConfigError(f"parallel.cp_size: {name} ({kind.__name__}) {why}; set cp_size to 1 for this model")


def _begin(attend: ContextAttention, positions: PositionsProbe, last: LastPosition) -> Callable:
    """Before the forward pass: take the layout of the micro-batch, which says more than a mask."""

    def hook(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        kwargs = dict(kwargs)
        attend.layout = kwargs.pop("context_layout", None)
        kwargs.pop("attention_mask", None)
        attend.called.clear()
        positions.expected = last.position_ids = kwargs.get("position_ids")
        return args, kwargs

    return hook


def _finish(attend: ContextAttention, positions: PositionsProbe, modules: dict[str, nn.Module]) -> Callable:
    """After the forward pass: has the whole sequence been seen?"""

    def hook(model: PreTrainedModel, args: tuple, output: Any) -> None:
        for name, module in modules.items():
            if module not in attend.called:
                raise _error(name, module, "did not attend through transformers' attention interface")
        if not (positions.used or positions.unneeded):
            raise _error("model", model, "does not use the position ids that it is given")
        positions.remove()

    return hook
