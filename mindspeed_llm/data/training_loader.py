"""From prepared or streamed data to the loader of the training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_llm.config import TrainingConfig
from mindspeed_llm.data.collate import Collator
from mindspeed_llm.data.factory import Data
from mindspeed_llm.data.loader import StepLoader
from mindspeed_llm.data.stream_loader import RowStream, StreamedData, StreamLoader


def training_loader(
    data: Data,
    training: TrainingConfig,
    *,
    pad_token_id: int,
    pad_to_multiple: int = 8,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
    gather: Callable[[Any], list[Any]] = lambda value: [value],
) -> StepLoader | StreamLoader:
    """Micro-batches for one data-parallel rank. ``gather`` collects a value from every rank."""
    batch_size, accumulation = training.per_device_train_batch_size, training.gradient_accumulation_steps
    if isinstance(data.train, StreamedData):
        return StreamLoader(
            RowStream(data.train, rank, world_size),
            batch_size=batch_size,
            accumulation=accumulation,
            num_steps=training.max_steps,
            collate=Collator(pad_token_id, pad_to_multiple, data.quirks),
            gather=gather,
        )
    return StepLoader(
        data.train,
        batch_size=batch_size,
        max_tokens=training.max_tokens_per_batch,
        accumulation=accumulation,
        seed=training.seed,
        rank=rank,
        world_size=world_size,
        pad_token_id=pad_token_id,
        pad_to_multiple=pad_to_multiple,
        shuffle=not (training.disable_shuffling or data.shuffled),
        drop_last=training.dataloader_drop_last,
        num_workers=num_workers,
        quirks=data.quirks,
    )
