"""Every wrong value ends in one message with place, key, value and remedy; the right ones load as they are meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from mindspeed_llm.config import Config, TrainingConfig, load_config
from tests.distributed import REPOSITORY
from tests.llm.config.conftest import MINIMAL

Load = Callable[..., Config]
Error = Callable[..., str]


def test_defaults(load: Load) -> None:
    config = load()
    assert config.training.lr == 1e-5
    assert config.training.save_total_limit == 3
    assert config.data.enable_thinking is True
    assert config.parallel.fsdp_size is None


@pytest.mark.parametrize("spelling", ["1e-4", "1E-4", "1.0e-4", "0.0001", "'1e-4'", ".0001", "1e-04"])
def test_a_number_is_a_number_however_it_is_spelt(spelling: str, load: Load) -> None:
    lr = load(yaml=MINIMAL + f"  lr: {spelling}\n").training.lr
    assert lr == 1e-4
    assert type(lr) is float


def test_a_whole_number_is_a_number(load: Load) -> None:
    assert load("--training.num_train_epochs=2").training.num_train_epochs == 2.0


@pytest.mark.parametrize("spelling", ["null", "~", "None", "", "'None'"])
def test_null_has_several_spellings(spelling: str, load: Load) -> None:
    config = load(yaml=MINIMAL.replace("data:", f"  tokenizer_name_or_path: {spelling}\ndata:"))
    assert config.model.tokenizer_name_or_path is None
    assert load(f"--data.enable_thinking={spelling}").data.enable_thinking is None


def test_null_where_there_is_none_is_an_error(error: Error) -> None:
    message = "run.yaml, line 8: training.lr: must be a number, got null; leave the key out for its default"
    assert error(yaml=MINIMAL + "  lr:\n") == message
    assert error(yaml=MINIMAL + "  lr: None\n") == message


@pytest.mark.parametrize(("spelling", "value"), [("1", True), ("0", False), ("yes", True), ("False", False)])
def test_switches(spelling: str, value: bool, load: Load) -> None:
    assert load(f"--training.disable_shuffling={spelling}").training.disable_shuffling is value


def test_empty_sections_have_their_defaults(load: Load) -> None:
    assert load(yaml=MINIMAL + "parallel:\noptimization: {}\n") == load()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.seed=1.0", "must be a whole number, got the number 1.0"),
        ("training.seed=true", "must be a whole number, got true"),
        ("training.max_steps=1e3", "must be a whole number, got the text '1e3'"),
        ("training.seed=-1", "must be at least 0, got the number -1"),
        ("training.lr=fast", "must be a number, got the text 'fast'"),
        ("training.lr=[1]", "must be a number, got the list [1]"),
        ("training.lr=true", "must be a number, got true"),
        ("training.lr=.nan", "must be a finite number, got the number nan"),
        ("training.lr=inf", "must be a finite number, got the number inf"),
        ("training.adam_beta2=1.0", "must be below 1, got the number 1.0"),
        ("training.adam_epsilon=0", "must be above 0, got the number 0"),
        ("training.warmup_ratio=3", "must be at most 1, got the number 3"),
        ("training.deterministic=2", "must be true or false, got the number 2"),
        ("training.deterministic='yes'", "must be true or false, got the text 'yes'"),
        ("training.stage=stf", "must be 'pt' or 'sft', got the text 'stf'; did you mean sft?"),
        ("training.lr_scheduler_type=3", "must be 'cosine', 'linear', 'constant' or 'wsd', got the number 3"),
        ("training.output_dir=2024", "must be text, got the number 2024; put it in quotes"),
        ("training.output_dir=2024-01-31", "must be text, got the date 2024-01-31; put it in quotes"),
        ("data.template={a: b}", "must be text, got the mapping {'a': 'b'}; put a text with a colon in quotes"),
        ("model.plugins=my.module", "must be a list, got the text 'my.module'; write [my.module]"),
        ("model.plugins=[1]", "must be text, got the number 1"),
        ("data.dataset=[a, b]", "must be text, got the list ['a', 'b']"),
        ("data.dataset.num_samples=0", "must be above 0, got the number 0"),
        ("data.dataset.formatting=sharegtp", "did you mean sharegpt?"),
        ("data.dataset.columns=[a]", "must be a mapping of keys to values, got the list ['a']"),
    ],
)
def test_wrong_values(override: str, message: str, error: Error) -> None:
    key = override.partition("=")[0]
    text = error(f"--{override}")
    assert text.startswith(f"run.yaml: --{override}: {key}")
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize("section", ["model", "data", "training", "parallel"])
@pytest.mark.parametrize("value", ["[1, 2]", "yes", "3"])
def test_a_section_is_a_mapping(section: str, value: str, error: Error) -> None:
    message = error(yaml=MINIMAL.replace(f"{section}:", f"x_{section}:") + f"{section}: {value}\n")
    assert f"{section}: must be a mapping of keys to values, got" in message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.learning_rat=1", "did you mean training.lr?"),
        ("training.learning_rate=1", "did you mean training.lr?"),
        ("training.warmup_step=1", "did you mean training.warmup_steps?"),
        ("training.cutoff_len=1", "it belongs to data.cutoff_len"),
        ("training.cutof_len=1", "did you mean data.cutoff_len?"),
        ("training.use_fused_rmsnorm=true", "it belongs to optimization.use_fused_rmsnorm"),
        ("optimization.indexer_loss_coeff=1", "it belongs to training.indexer_loss_coeff"),
        ("data.max_seq_length=1", "did you mean data.cutoff_len?"),
        ("training.bf16=true", "did you mean parallel.param_dtype?"),
        ("data.dataset.formating=alpaca", "did you mean data.dataset.formatting?"),
        ("data.dataset.colums.prompt=x", "did you mean data.dataset.columns?"),
        ("data.dataset.columns.promt=x", "data.dataset.columns.promt: unknown key; known here are 'prompt', 'query'"),
        ("data.dataset.tags.role=x", "data.dataset.tags.role: unknown key; known here are 'role_tag'"),
        ("data.dataset.xyz=1", "unknown key; known here are file_name, formatting, columns, tags, num_samples"),
        ("trainings.lr=1", "trainings: unknown key; did you mean training?"),
        ("xyz.lr=1", "xyz: unknown key; known here are model, data, parallel, training, optimization"),
        ("training.xyz=1", "unknown key; `python -m mindspeed_llm.config` lists the known ones"),
    ],
)
def test_unknown_keys_at_any_depth(override: str, message: str, error: Error) -> None:
    assert message in error(f"--{override}")


def test_keys_that_are_no_text(error: Error) -> None:
    assert "line 8: training.3: unknown key" in error(yaml=MINIMAL + "  3: 4\n")


def test_required_keys_are_named_even_if_their_section_is_missing(error: Error) -> None:
    assert error(yaml="optimization: {}\n").splitlines() == [
        "run.yaml: 3 problems",
        "  model.model_name_or_path: this key is required",
        "  data.dataset: this key is required",
        "  training.output_dir: this key is required",
    ]
    assert error(yaml=MINIMAL.replace("  output_dir: out\n", "  seed: 1\n")) == (
        "run.yaml, line 6: training.output_dir: this key is required"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.val_size=0.1", "data.eval_dataset.file_name=train.jsonl"],
            "data.val_size: 0.1 and eval_dataset are both",
        ),
        (["data.val_size=1.5"], "data.val_size: 1.5 is neither a fraction below 1 nor a whole number of rows"),
        (["data.mask_history=true", "data.train_on_prompt=true"], "data.mask_history: the loss cannot leave out"),
        (
            ["training.warmup_ratio=0.1", "training.warmup_steps=5"],
            "training.warmup_steps: 5 and warmup_ratio 0.1 are both",
        ),
        (["training.max_steps=0"], "training.max_steps: must be at least 1, or -1"),
        (["training.max_steps=-5"], "training.max_steps: must be at least 1, or -1"),
        (["training.lr=1e-7"], "training.min_lr: 1e-06 is above lr 1e-07"),
        (
            ["parallel.cp_size=2", "model.attn_implementation=eager"],
            "parallel: cp_size brings an attention implementation of its own: drop model.attn_implementation",
        ),
        (
            ["training.compile=true", "parallel.recompute=true", "parallel.recompute_mode=selective"],
            "training: compile hides from parallel.recompute_mode: selective what it would keep; drop one",
        ),
    ],
)
def test_contradictions(overrides: list[str], message: str, error: Error) -> None:
    assert message in error(*(f"--{override}" for override in overrides))


def test_what_only_looks_like_a_contradiction(load: Load) -> None:
    assert load("--data.val_size=200").data.val_size == 200
    assert load("--training.lr=1e-7", "--training.lr_scheduler_type=constant").training.lr == 1e-7
    assert load("--training.warmup_steps=5").training.warmup_ratio is None


def test_all_problems_come_in_one_message_in_the_order_of_the_file(error: Error) -> None:
    yaml = MINIMAL.replace("train.jsonl", "tran.jsonl") + "  lr: fast\n  learning_rat: 1\n  min_lr: 0\n  min_lr: 0\n"
    lines = error("--training.seed=x", yaml=f"{yaml}parallel:\n  tp_size: 2\n").splitlines()
    assert lines[0] == "run.yaml: 6 problems"
    places = [line.split(":")[0].strip() for line in lines[1:]]
    assert places == ["line 5", "line 8", "line 9", "line 11", "line 13", "--training.seed=x"]


def test_the_dumped_configuration_reads_back_equal(load: Load, folder: Path) -> None:
    config = load("--training.warmup_steps=5", "--data.default_system='Grüß Gott: None'", "--training.lr=1e-4")
    dumped = folder / "resolved.yaml"
    dumped.write_text(config.dump_yaml(), encoding="utf-8")
    assert load_config(dumped) == config
    assert "fsdp_modules: null" in config.dump_yaml()  # defaults are filled in


def test_sections_check_themselves_and_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="are both given"):
        TrainingConfig(output_dir="out", warmup_ratio=0.1, warmup_steps=3)
    with pytest.raises(ValidationError, match="frozen"):
        TrainingConfig(output_dir="out").lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("path", sorted(REPOSITORY.glob("examples/**/*.yaml")), ids=lambda path: path.name)
def test_shipped_files_load(path: Path, folder: Path) -> None:
    """Whatever folder they are run from; the model of one is made by a script first."""
    load_config(path, [f"--model.model_name_or_path={folder / 'model'}"])


def test_interleave_probs(load: Load, error: Error, folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "dataset_info.json").write_text("{}")
    names = ("--data.dataset=a,b", "--data.mix_strategy=interleave_over")
    for written in ("0.25,0.75", "[0.25, 0.75]", "[25e-2, 75e-2]"):
        assert load(*names, f"--data.interleave_probs={written}").data.interleave_probs == [0.25, 0.75]
    assert "must be positive and add up to 1" in error(*names, "--data.interleave_probs=0.5,0.6")
    assert "must be positive and add up to 1" in error(*names, "--data.interleave_probs=0,1")
    assert "has 3 probabilities, but dataset names 2" in error(*names, "--data.interleave_probs=0.2,0.3,0.5")
    assert "must be a number" in error(*names, "--data.interleave_probs=half,half")
    assert "not concat" in error("--data.dataset=a,b", "--data.interleave_probs=0.5,0.5")


def test_what_streaming_cannot_do(load: Load, error: Error) -> None:
    streaming = ("--data.streaming=true", "--training.max_steps=5")
    assert load(*streaming).data.buffer_size == 16384
    assert "data.streaming has no epochs that could be counted: set max_steps" in error("--data.streaming=true")
    assert "give an eval_dataset" in error(*streaming, "--data.val_size=0.1")
    assert "drop max_samples" in error(*streaming, "--data.max_samples=10")
    assert "parity: llamafactory is for prepared data" in error(*streaming, "--training.parity=llamafactory")
    assert "need no preparation" in error(*streaming, "--data.data_manager_type=mg", "--training.stage=pt")


def test_max_tokens_per_batch_is_for_prepared_rows(load: Load, error: Error) -> None:
    budget = "--training.max_tokens_per_batch=4096"
    assert load(budget).training.max_tokens_per_batch == 4096
    assert "does not go with data.streaming" in error(budget, "--data.streaming=true", "--training.max_steps=5")
    assert "does not go with data.data_manager_type: mg" in error(
        budget, "--data.data_manager_type=mg", "--training.stage=pt"
    )
    assert "does not go with training.parity: llamafactory" in error(budget, "--training.parity=llamafactory")


def test_evaluating_each_data_set_needs_data_sets(load: Load, error: Error, folder: Path) -> None:
    each = "--data.eval_on_each_dataset=true"
    assert "there is no eval_dataset" in error(each)
    assert "there is no eval_dataset" in error(each, "--data.val_size=0.1")
    (folder / "data").mkdir()
    (folder / "data" / "dataset_info.json").write_text("{}")
    assert load(each, "--data.eval_dataset=a,b").data.eval_on_each_dataset
