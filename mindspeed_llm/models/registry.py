"""Model classes of the user's own, selected by ``model.model_id``.

``@register("my_model")`` above the class in ``my_package/my_model.py``, and ``model.plugins: [my_package.my_model]``
with ``model.model_id: my_model`` in the YAML, are all that it takes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from difflib import get_close_matches

from transformers import PreTrainedModel

from mindspeed_llm.errors import ConfigError

_MODELS: dict[str, type[PreTrainedModel]] = {}


def register(name: str) -> Callable[[type[PreTrainedModel]], type[PreTrainedModel]]:
    """Make a model class available as ``model.model_id: name``; its ``config_class`` reads the model's config.json.

    The class is used as it is: parallelism, loading and export are applied from outside. It follows the rules of
    transformers: ``post_init()`` at the end of ``__init__``, and ``_init_weights`` gives every parameter its value.
    Raises ValueError when another class has the name.
    """

    def add(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
        known = _MODELS.setdefault(name, model_class)
        if (known.__module__, known.__qualname__) != (model_class.__module__, model_class.__qualname__):
            raise ValueError(f"model {name!r} is registered already: {known.__module__}.{known.__qualname__}")
        _MODELS[name] = model_class  # a module that was reloaded brings its class anew
        return model_class

    return add


def get_model_class(name: str) -> type[PreTrainedModel]:
    """The class registered as ``name``. Raises ConfigError with the known names."""
    if name not in _MODELS:
        near = get_close_matches(name, _MODELS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        known = ", ".join(sorted(_MODELS)) or "none; list the module that registers yours under model.plugins"
        raise ConfigError(f"model.model_id: {name!r} is not registered{hint} (registered: {known})")
    return _MODELS[name]


def import_plugins(modules: Iterable[str]) -> None:
    """Import the modules of ``model.plugins``. Raises ConfigError for one that cannot be found."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"model.plugins: cannot import {name!r} ({error}); modules are looked up in the working directory, "
                "in PYTHONPATH and among the installed packages"
            ) from error
