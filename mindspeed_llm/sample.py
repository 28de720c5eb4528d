"""Ask an exported model one question with plain transformers: ``python -m mindspeed_llm.sample FOLDER PROMPT``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mindspeed_llm.errors import DataError
from mindspeed_llm.launch import report_error


def sample_answer(
    folder: str | Path, prompt: str, max_new_tokens: int = 64, *, chat: bool = True, trust_remote_code: bool = False
) -> str:
    """The greedy answer of the Hugging Face model in ``folder``, loaded as any user of it would load it, on the CPU.

    With ``chat``, ``prompt`` is the user's turn of the tokenizer's chat template and the result is the assistant's,
    at most ``max_new_tokens`` tokens of it. Without, or when the tokenizer has no template, the model goes on writing
    ``prompt`` and the result is what it added. Raises DataError if ``folder`` is no model folder.
    """
    if not (Path(folder) / "config.json").is_file():
        raise DataError(f"{folder}: not a Hugging Face model folder, there is no config.json in it")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust_remote_code).eval()
    is_chat = chat and tokenizer.chat_template is not None
    if is_chat:
        messages = [{"role": "user", "content": prompt}]
        prompt = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    # A chat template writes the special tokens itself.
    input_ids = tokenizer(prompt, add_special_tokens=not is_chat, return_tensors="pt").input_ids
    own = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}
    with torch.inference_mode():
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=sorted(ends) or None,
        )
    return str(tokenizer.decode(output[0, input_ids.shape[1] :], skip_special_tokens=True)).strip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mindspeed_llm.sample", description="Ask an exported model.")
    parser.add_argument("folder", help="a Hugging Face model folder, such as a run's hf/")
    parser.add_argument("prompt")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--raw", action="store_true", help="go on writing the prompt instead of answering it in a chat")
    args = parser.parse_args()
    try:
        print(sample_answer(args.folder, args.prompt, args.max_new_tokens, chat=not args.raw))
    except Exception as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
