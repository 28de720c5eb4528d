"""``sample_answer`` is greedy decoding of the model and tokenizer in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from mindspeed_llm.sample import main, sample_answer
from tests.distributed import REPOSITORY

PROMPT = "What is the opposite of hot?"
TURN = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(REPOSITORY / "examples" / "quickstart" / "model")


def make_model(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    """A random model, saved with the quickstart's tokenizer."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.5,  # makes the greedy choices depend on the whole prompt
    )
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def decode_greedily(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, text: str, length: int) -> list[int]:
    """The definition: append the likeliest token, ``length`` times or until the turn ends."""
    ids = tokenizer(text, return_tensors="pt").input_ids
    start = ids.shape[1]
    with torch.no_grad():
        while ids.shape[1] < start + length:
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
            if ids[0, -1] == tokenizer.eos_token_id:
                break
    return ids[0, start:].tolist()


def test_prompt_is_a_users_turn(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    model = make_model(tmp_path, tokenizer)
    assert sample_answer(tmp_path, PROMPT, 12) == tokenizer.decode(decode_greedily(model, tokenizer, TURN, 12)).strip()


def test_without_chat_the_prompt_is_continued(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    model = make_model(tmp_path, tokenizer)
    expected = tokenizer.decode(decode_greedily(model, tokenizer, PROMPT, 12)).strip()
    assert sample_answer(tmp_path, PROMPT, 12, chat=False) == expected != sample_answer(tmp_path, PROMPT, 12)


@pytest.mark.parametrize("as_list", [False, True])
def test_answer_ends_where_the_model_says_too(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, as_list: bool
) -> None:
    model = make_model(tmp_path, tokenizer)
    ids = decode_greedily(model, tokenizer, TURN, 12)
    end = next(i for i, token in enumerate(ids) if token != ids[0])
    model.generation_config.eos_token_id = [ids[end], 1] if as_list else ids[end]
    model.generation_config.save_pretrained(tmp_path)
    # The token is no special one and stays in the text.
    assert sample_answer(tmp_path, PROMPT, 12) == tokenizer.decode(ids[: end + 1]).strip()


def test_answer_ends_with_the_turn(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    model = make_model(tmp_path, tokenizer)
    first, *others = decode_greedily(model, tokenizer, TURN, 12)
    end = next(token for token in others if token != first)
    with torch.no_grad():  # wherever this token was the likeliest, the end of the turn is now likelier
        model.lm_head.weight[tokenizer.eos_token_id] = 1.01 * model.lm_head.weight[end]
    model.save_pretrained(tmp_path)
    ids = decode_greedily(model, tokenizer, TURN, 12)
    assert 1 < len(ids) < 12
    assert sample_answer(tmp_path, PROMPT, 12) == tokenizer.decode(ids[:-1]).strip()


def test_command_line(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_model(tmp_path, tokenizer)
    expected = sample_answer(tmp_path, PROMPT, 5, chat=False)
    monkeypatch.setattr("sys.argv", ["sample", str(tmp_path), PROMPT, "--raw", "--max-new-tokens", "5"])
    assert main() == 0
    assert capsys.readouterr().out == f"{expected}\n"
    absent = tmp_path / "absent"
    monkeypatch.setattr("sys.argv", ["sample", str(absent), PROMPT])
    assert main() == 2
    message = f"error: {absent}: not a Hugging Face model folder, there is no config.json in it\n"
    assert capsys.readouterr().err == message
