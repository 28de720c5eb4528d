"""Which data sets to read: inline, or by name from ``dataset_info.json``, with the keys of LLaMA-Factory."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from mindspeed_llm.config import DatasetSource
from mindspeed_llm.errors import ConfigError, DataError

Formatting = Literal["alpaca", "sharegpt", "openai"]

_COLUMNS: dict[str, dict[str, str]] = {  # when a data set does not name its columns
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output"},
    "sharegpt": {"messages": "conversations"},
    "openai": {"messages": "messages", "tools": "tools"},
}
_COLUMN_ROLES = ("prompt", "query", "response", "history", "messages", "system", "tools")
_TAGS: dict[str, dict[str, str]] = {
    "sharegpt": {
        "role_tag": "from",
        "content_tag": "value",
        "user_tag": "human",
        "assistant_tag": "gpt",
        "observation_tag": "observation",
        "function_tag": "function_call",
        "system_tag": "system",
    },
    "openai": {
        "role_tag": "role",
        "content_tag": "content",
        "user_tag": "user",
        "assistant_tag": "assistant",
        "observation_tag": "tool",
        "function_tag": "function",
        "system_tag": "system",
    },
}
_TAGS["alpaca"] = _TAGS["sharegpt"]
_REMOTE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "cloud_file_name", "script_url")
_KEYS = ("file_name", "formatting", "columns", "tags", "num_samples")
_IGNORED = ("ranking", "split", "subset", "folder")  # without meaning for files, but usual in shared files
_PREFERENCE_COLUMNS = ("chosen", "rejected", "kto_tag")
_MEDIA_COLUMNS = ("images", "videos", "audios")


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """One data set: where it is and how its rows are laid out."""

    name: str
    path: Path
    formatting: Formatting = "alpaca"
    columns: Mapping[str, str] = field(default_factory=dict)
    """Column of each part of a row (``prompt``, ``response``, ``messages``, ...), completed by the usual names."""
    tags: Mapping[str, str] = field(default_factory=dict)
    num_samples: int | None = None

    def column(self, role: str) -> str | None:
        return self.columns.get(role)


def dataset_specs(dataset: str | DatasetSource, dataset_dir: str | Path, stage: str = "sft") -> list[DatasetSpec]:
    """The data sets that ``data.dataset`` (or ``data.eval_dataset``) asks for. For ``stage="pt"`` the prompt is the
    text, in the column ``text`` unless the data set says otherwise."""
    if isinstance(dataset, DatasetSource):
        if not isinstance(dataset.file_name, str):
            missing = next(path for path in dataset.file_name if not Path(f"{path}.idx").exists())
            raise ConfigError(f"data.dataset: a blend is made of .bin and .idx files; there is no {missing}.idx")
        entry = dataset.model_dump(exclude_none=True)
        return [_spec(Path(dataset.file_name).stem, entry, Path(dataset_dir), "data.dataset", stage)]
    info_path = Path(dataset_dir) / "dataset_info.json"
    info = _read_info(info_path, dataset)
    names = [name.strip() for name in dataset.split(",") if name.strip()]
    for name in names:
        if name not in info:
            known = ", ".join(info) or "none"
            raise ConfigError(f"{info_path} has no data set {name!r}.{_hint(name, info)} It has: {known}.")
    if not names:
        raise ConfigError(f"data.dataset is empty. {info_path} has: {', '.join(info) or 'none'}.")
    return [_spec(name, info[name], Path(dataset_dir), f"{info_path}: {name}", stage) for name in names]


def _read_info(path: Path, dataset: str) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(
            f"data.dataset names {dataset!r}, but there is no {path} that says what it is. Set data.dataset_dir to the "
            "folder of dataset_info.json, or give the data set as a mapping: data.dataset: {file_name: FILE}."
        )
    try:
        info = json.loads(path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(info, dict):
        raise ConfigError(f"{path} must be a JSON object of data sets by name.")
    return info


def _spec(name: str, entry: Any, folder: Path, where: str, stage: str) -> DatasetSpec:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: must be an object with file_name, formatting, columns and tags.")
    for key in ("columns", "tags"):
        names = entry.get(key) or {}
        if not isinstance(names, Mapping) or not all(isinstance(name, str | None) for name in names.values()):
            raise ConfigError(f"{where}: {key} must be an object of names.")
    _refuse_what_is_not_sft(entry, where)
    formatting: Any = entry.get("formatting") or "alpaca"
    if formatting not in get_args(Formatting):
        raise ConfigError(f"{where}: formatting {formatting!r} is not one of {', '.join(get_args(Formatting))}.")
    if not isinstance(entry["file_name"], str):
        raise ConfigError(f"{where}: file_name {entry['file_name']!r} is not the path of a file or a folder.")
    samples = entry.get("num_samples")
    if samples is not None and (not isinstance(samples, int) or isinstance(samples, bool) or samples < 1):
        raise ConfigError(f"{where}: num_samples {samples!r} is not a number of rows.")
    columns = {**({"prompt": "text"} if stage == "pt" else _COLUMNS[formatting]), **(entry.get("columns") or {})}
    if "prompt" in (entry.get("columns") or {}) and "query" not in entry["columns"]:
        columns.pop("query", None)  # the prompt is the whole question
    _check_keys(columns, _COLUMN_ROLES, f"{where}: columns")
    _check_keys(entry.get("tags") or {}, tuple(_TAGS[formatting]), f"{where}: tags")
    return DatasetSpec(
        name=name,
        path=_find(entry["file_name"], folder, where),
        formatting=formatting,
        columns=columns,
        tags={**_TAGS[formatting], **(entry.get("tags") or {})},
        num_samples=samples,
    )


def _refuse_what_is_not_sft(entry: Mapping[str, Any], where: str) -> None:
    columns = entry.get("columns") or {}
    if entry.get("ranking") or any(column in columns for column in _PREFERENCE_COLUMNS):
        raise ConfigError(
            f"{where}: holds preference pairs (ranking), which need a preference loss; this trainer does pretraining "
            "and supervised fine-tuning. To train on the preferred answers, map that column as the response."
        )
    if media := [column for column in _MEDIA_COLUMNS if column in columns]:
        raise ConfigError(f"{where}: has {', '.join(media)}, but only text is supported.")
    if "file_name" not in entry:
        remote = [key for key in _REMOTE if key in entry]
        raise ConfigError(
            f"{where}: {', '.join(remote) or 'no file_name'}: only local files are read. Download the data set and "
            "give the file or folder as file_name."
        )
    _check_keys(entry, (*_KEYS, *_IGNORED, *_REMOTE), where)


def _check_keys(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in given:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}.{_hint(key, known)} Known: {', '.join(known)}.")


def _hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _find(file_name: str, folder: Path, where: str) -> Path:
    """The file as given or in ``dataset_dir``."""
    candidates = [folder / file_name, Path(file_name)]
    for path in candidates:
        if _exists(path):
            return path
    tried = " or ".join(dict.fromkeys(str(path) for path in candidates))
    raise DataError(f"{where}: file_name {file_name!r}: there is no {tried}.")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or with a null byte in it
        return False
