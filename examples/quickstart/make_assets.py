"""Write the quickstart's data, tokenizer and model configuration: ``python make_assets.py [FOLDER]``.

The files are committed; this script is how they were made, and a test checks that it still makes the same.

Each fact can be asked in several wordings. One of them is kept out of the training data and asked in the held-out file
only, so the evaluation loss tells whether the model learnt the fact or the sentence.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from facts import TALK, TOPICS, Topic
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SEED = 20240817
VOCAB_SIZE = 1024
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Turn = tuple[str, str]  # question, answer


def capitalised(sentence: str) -> str:
    """The sentence with its first letter in upper case: facts such as ``hot`` may begin one."""
    return sentence[:1].upper() + sentence[1:]


def ask(topic: Topic) -> Iterator[tuple[Turn, bool]]:
    """Every (question, answer) of a topic, and whether this wording of the fact is held out."""
    for number, fact in enumerate(topic.facts):
        for wording, question in enumerate(topic.questions):
            held_out = len(topic.questions) > 1 and wording == number % len(topic.questions)
            yield (capitalised(question.format(*fact)), capitalised(topic.answer.format(*fact))), held_out


def conversation(turns: Iterable[Turn]) -> dict[str, list[dict[str, str]]]:
    """Turns as one row in ShareGPT form."""
    return {
        "conversations": [
            message
            for question, answer in turns
            for message in ({"from": "human", "value": question}, {"from": "gpt", "value": answer})
        ]
    }


def make_conversations(rng: random.Random) -> tuple[list[dict], list[dict]]:
    """Training rows (one to three questions each, every training question twice) and held-out rows (one question)."""
    asked = [item for topic in TOPICS for item in ask(topic)]
    held_out = [turn for turn, is_held_out in asked if is_held_out]
    training = [turn for turn, is_held_out in asked if not is_held_out]
    train_rows = []
    for _ in range(2):
        rng.shuffle(training)
        rest = iter(training)
        while turns := list(islice(rest, rng.randint(1, 3))):
            train_rows.append(conversation(turns))
    return train_rows, [conversation([turn]) for turn in held_out]


def make_texts(rng: random.Random, documents: int = 800) -> list[dict[str, str]]:
    """Raw text for pretraining: documents of three to nine sentences, about one topic or about several."""
    by_topic = [
        [capitalised(form.format(*fact)) for fact in topic.facts for form in topic.statements]
        for topic in TOPICS
        if topic is not TALK
    ]
    everything = [sentence for sentences in by_topic for sentence in sentences]
    pools = [*by_topic, everything]
    return [{"text": " ".join(rng.sample(rng.choice(pools), rng.randint(3, 9)))} for _ in range(documents)]


def make_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE: any text can be encoded, the words of the data are single tokens or nearly so."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def write_jsonl(path: Path, rows: Iterable[dict]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def main(folder: Path) -> None:
    rng = random.Random(SEED)
    train_rows, held_out_rows = make_conversations(rng)
    texts = make_texts(rng)
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "train.jsonl", train_rows)
    write_jsonl(folder / "held_out.jsonl", held_out_rows)
    write_jsonl(folder / "text.jsonl", texts)

    sentences = [message["value"] for row in train_rows for message in row["conversations"]]
    tokenizer = make_tokenizer([*sentences, *(row["text"] for row in texts)])
    tokenizer.save(str(model / "tokenizer.json"))
    end_of_text, _, end_of_turn = (tokenizer.token_to_id(token) for token in SPECIAL_TOKENS)
    write_json(
        model / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 512,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    write_json(
        model / "config.json",
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "eos_token_id": end_of_turn,
            "pad_token_id": end_of_text,
        },
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
