"""Files and folders that a configuration names.

One rule for all that is read: a relative path is looked up from the folder of the YAML file, then from the current
folder. What is written (``training.output_dir``) is relative to the current folder.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from mindspeed_llm.config.data_schema import DataConfig
from mindspeed_llm.config.source import Source
from mindspeed_llm.config.types import blended_files


def resolve_files(source: Source) -> None:
    """Make the paths of everything that is read absolute; note what is missing."""
    values = source.values
    _resolve(source, "model", "model_name_or_path", folder=True, holds="config.json")
    _resolve(source, "model", "tokenizer_name_or_path", folder=True)
    _resolve_blend(source)
    _resolve(source, "data", "dataset", "file_name", or_ending=".idx" if _is_indexed(values["data"]) else "")
    _resolve(source, "data", "eval_dataset", "file_name")
    data = values["data"] if isinstance(values["data"], dict) else {}
    if any(isinstance(data.get(name), str) for name in ("dataset", "eval_dataset")):
        data.setdefault("dataset_dir", DataConfig.model_fields["dataset_dir"].default)
        names = "; it explains the names in data.dataset: to give a file, write dataset: {file_name: FILE}"
        _resolve(source, "data", "dataset_dir", folder=True, holds="dataset_info.json", remark=names)
    _resolve(source, "training", "resume_from_checkpoint", folder=True, besides=("auto",))


def _is_indexed(data: Any) -> bool:
    """Whether ``file_name`` may be a prefix of the files that are there."""
    return isinstance(data, dict) and data.get("data_manager_type") == "mg"


def _resolve_blend(source: Source) -> None:
    """The paths of several ``.bin``/``.idx`` pairs, as a mapping to their weights whatever way they were written."""
    data = source.values["data"]
    dataset = data.get("dataset") if isinstance(data, dict) else None
    if not isinstance(dataset, dict) or not isinstance(dataset.get("file_name"), list | dict):
        return
    try:
        blend = blended_files(dataset["file_name"])
    except ValueError:
        return  # the schema says what is wrong with it
    keys = ("data", "dataset", "file_name")
    found = {_find(source, keys, str(given), or_ending=".idx"): weight for given, weight in blend.items()}
    dataset["file_name"] = found


def _resolve(
    source: Source,
    *keys: str,
    folder: bool = False,
    holds: str | None = None,
    besides: tuple[str, ...] = (),
    or_ending: str = "",
    remark: str = "",
) -> None:
    node: Any = source.values
    for key in keys[:-1]:
        node = node.get(key) if isinstance(node, dict) else None
    given = node.get(keys[-1]) if isinstance(node, dict) else None
    if not isinstance(given, str) or given in ("None", *besides):  # of another type: not a matter of files
        return
    node[keys[-1]] = _find(source, keys, given, folder=folder, holds=holds, or_ending=or_ending, remark=remark)


def _find(
    source: Source,
    keys: tuple[str, ...],
    given: str,
    *,
    folder: bool = False,
    holds: str | None = None,
    or_ending: str = "",
    remark: str = "",
) -> str:
    """The absolute path of what is ``given``; as it is, and a problem noted, where there is nothing."""
    bases = (source.path.parent.absolute(), Path.cwd())
    candidates = list(dict.fromkeys(base / Path(given).expanduser() for base in bases))
    found = [path for path in candidates if path.exists() or Path(f"{path}{or_ending}").exists()]
    fitting = [path for path in found if not folder or (path.is_dir() and (holds is None or (path / holds).is_file()))]
    if fitting:
        return str(fitting[0])
    if found:
        what = f"has no {holds}" if found[0].is_dir() else "is a file; a folder is needed"
        source.report(keys, f"{found[0]} {what}{remark}")
    else:
        source.report(keys, f"there is no {' or '.join(map(str, candidates))}{_hint(candidates)}{remark}")
    return given


def _hint(candidates: list[Path]) -> str:
    """The entry of the same folder that was probably meant."""
    for path in candidates:
        if path.parent.is_dir():
            entries = [entry.name for entry in path.parent.iterdir()]
            if near := difflib.get_close_matches(path.name, entries, n=1):
                return f"; did you mean {path.with_name(near[0])}?"
    return ""
