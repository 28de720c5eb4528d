"""Cutting micro-batches: every token once, documents as they were, the same work for every rank."""

from __future__ import annotations

import pytest
import torch

from mindspeed_llm.data.collate import Batch
from mindspeed_llm.parallel.context.layout import Block, SequenceLayout, find_documents
from mindspeed_llm.parallel.context.sharder import ContextSharder

SHAPES = [(1, 2), (2, 1), (4, 1), (2, 2), (3, 2)]


def group(ring: int, ulysses: int) -> list[ContextSharder]:
    return [ContextSharder(ring, ulysses, r, u) for r in range(ring) for u in range(ulysses)]


def packed_batch(*rows: list[int]) -> Batch:
    """Rows of documents of the given lengths; labels already shifted, as the collator makes them."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])
    ids = torch.arange(1, positions.numel() + 1).view_as(positions)
    labels = torch.where(positions.roll(-1, 1) == 0, -100, ids + 1)
    return Batch(input_ids=ids, labels=labels, position_ids=positions)


@pytest.mark.parametrize(("ring", "ulysses"), SHAPES)
@pytest.mark.parametrize("length", [1, 7, 13, 48, 2999])
def test_every_token_is_on_one_rank_with_its_own_label_and_position(ring, ulysses, length):
    # faults X2: a length that no number of ranks divides; X1, B3.3: labels are shifted before the cut
    batch = packed_batch([length])
    parts = [sharder.shard_batch(batch) for sharder in group(ring, ulysses)]
    sizes = {part["input_ids"].shape for part in parts}
    assert len(sizes) == 1
    tokens = {name: torch.cat([part[name] for part in parts], dim=1)[0] for name in batch}
    padded = tokens["input_ids"].numel()
    assert padded - length < 2 * ring * ulysses
    order = torch.cat([sharder.local_token_global_indices(padded) for sharder in group(ring, ulysses)]).argsort()
    if padded > length:
        assert torch.cat([part["attention_mask"] for part in parts], dim=1)[0][order].sum() == length
    for name, values in batch.items():
        assert torch.equal(tokens[name][order][:length], values[0]), name
    assert (tokens["labels"][order][length:] == -100).all()
    assert torch.equal(tokens["position_ids"][order][length:], torch.arange(padded - length))


def test_one_rank_keeps_the_batch():
    batch = packed_batch([3, 4])
    assert ContextSharder().shard_batch(batch) is batch
    assert ContextSharder.of(None) == ContextSharder()


def test_an_uncut_length_is_an_error():
    with pytest.raises(ValueError, match="13 tokens cannot be cut for 2 ranks: pad to a multiple of 4"):
        ContextSharder(2, 1).local_token_global_indices(13)


def test_documents_are_found_before_the_cut():
    batch = packed_batch([3, 11, 7], [1, 1, 19])
    part = ContextSharder(2, 2, 1, 0).shard_batch(batch)
    # 21 tokens become 24: the padding of each row is a document behind it
    assert part.layout.cu_seqlens.tolist() == [0, 3, 14, 21, 24, 25, 26, 45, 48]
    assert part.layout.counted.sum() == 42


def test_a_padded_row_is_one_document_and_its_padding_another():
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    # positions of padding, as any collator makes them, say nothing
    assert find_documents(torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]), mask).tolist() == [0, 3, 5, 10]
    assert find_documents(torch.tensor([[0, 1, 2, 0, 0], [0, 1, 2, 3, 4]]), mask).tolist() == [0, 3, 5, 10]


def test_padding_does_not_count_as_tokens():
    batch = packed_batch([5], [5])
    batch["attention_mask"] = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    assert ContextSharder(2, 1).shard_batch(batch).layout.counted.sum() == 8
    assert ContextSharder(2, 1).shard_batch(packed_batch([5], [5])).layout.counted.sum() == 10


def test_ranks_agree_on_the_layout():
    batch = packed_batch([3, 11, 7], [1, 1, 19])
    first, *others = [sharder.shard_batch(batch).layout for sharder in group(2, 2)]
    for other in others:
        assert torch.equal(other.cu_seqlens, first.cu_seqlens)
        assert torch.equal(other.counted, first.counted)


def visible(layout: SequenceLayout, window: int | None) -> torch.Tensor:
    """bool [batch, seq, seq], from the definition."""
    tokens = torch.arange(int(layout.cu_seqlens[-1])).view(-1, layout.seq)
    document = torch.searchsorted(layout.cu_seqlens, tokens, right=True)
    distance = tokens[:, :, None] - tokens[:, None, :]
    mask = (document[:, :, None] == document[:, None, :]) & (distance >= 0)
    return mask if window is None else mask & (distance < window)


def seen_in(block: Block | None, batch: int, chunk: int) -> torch.Tensor:
    """bool [batch * chunk, batch * chunk]: what ``flash_attention`` lets a block's queries see, without the window."""
    mask = torch.zeros(batch * chunk, batch * chunk, dtype=torch.bool)
    if block is None:
        return mask
    for (q, q_end), (k, k_end), offset in zip(
        block.cu_seqlens_q.unfold(0, 2, 1).tolist(),
        block.cu_seqlens_k.unfold(0, 2, 1).tolist(),
        block.query_offsets.tolist(),
        strict=True,
    ):
        distance = torch.arange(q_end - q)[:, None] + offset - torch.arange(k_end - k)
        mask[q:q_end, k:k_end] = distance >= 0
    return mask


@pytest.mark.parametrize("ring", [2, 3])
@pytest.mark.parametrize("rows", [([24],), ([1] * 24,), ([3, 11, 10], [1, 22, 1]), ([4, 4, 4, 12], [12, 12])])
def test_blocks_together_are_the_causal_mask_within_documents(ring, rows):
    layout = ContextSharder(ring, 1).shard_batch(packed_batch(*rows)).layout
    batch, chunk = len(rows), layout.chunk
    for window in (None, 1, 5):
        expected = visible(layout, window)
        for a in range(2 * ring):
            for b in range(2 * ring):
                part = expected[:, a * chunk : (a + 1) * chunk, b * chunk : (b + 1) * chunk]
                part = torch.block_diag(*part)  # a row sees nothing of another row
                block = layout.block(a, b, window)
                assert (block is not None) == bool(part.any())
                if window is None:
                    assert torch.equal(seen_in(block, batch, chunk), part.bool())


@pytest.mark.parametrize("ring", [2, 3, 4])
def test_the_ranks_of_a_ring_have_the_same_work(ring):
    layout = ContextSharder(ring, 1).shard_batch(packed_batch([48])).layout
    mask = visible(layout, None)[0]
    work = {int(mask[ContextSharder(ring, 1, rank, 0).local_token_global_indices(48)].sum()) for rank in range(ring)}
    assert len(work) == 1


@pytest.mark.parametrize(("ring", "ulysses"), [*SHAPES, (2, 3)])
@pytest.mark.parametrize("rows", [([24],), ([1] * 24,), ([3, 11, 10], [1, 22, 1]), ([5], [5])])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_convolution_of_halves_is_that_of_documents(ring, ulysses, rows, width):
    """Also where a rank's halves are shorter than the convolution reaches back."""
    batch = packed_batch(*rows)
    parts = [sharder.shard_batch(batch) for sharder in group(ring, ulysses)]
    layout = parts[0].layout
    taps = torch.tensor([1000, 100, 10, 1])[-width:]
    halves = [part["input_ids"].unflatten(1, (2, -1)) for part in parts]  # [batch, 2, half]
    reach, half = width - 1, halves[0].shape[2]
    given = torch.stack([x[:, :, half - min(reach, half) :] for x in halves]).transpose(0, 1).flatten(1)
    found = []
    for rank, own in enumerate(halves):
        halo = layout.halo(rank, reach)
        before = given[:, halo.index.flatten()].view(len(rows), 2, reach).where(halo.visible, 0)
        flat = torch.cat([before, own], dim=2).flatten()
        out = torch.cat([convolve(x, taps) for x in flat.tensor_split(halo.cu_seqlens[1:-1])])
        found.append(out.view(len(rows), 2, reach + half)[:, :, reach:].flatten(1))
    order = layout.held.flatten().argsort()
    whole = torch.cat(found, dim=1)[:, order]
    length = batch["input_ids"].shape[1]
    expected = torch.cat([convolve(x, taps) for x in _documents(batch)]).view(len(rows), length)
    assert torch.equal(whole[:, :length], expected)


def convolve(x: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """Of one document ``[tokens]``, from the definition; the last tap is of the token itself."""
    padded = torch.cat([x.new_zeros(len(taps) - 1), x])
    return (padded.unfold(0, len(taps), 1) * taps).sum(1)


def _documents(batch: Batch) -> tuple[torch.Tensor, ...]:
    starts = (batch["position_ids"].flatten() == 0).nonzero().flatten()
    return batch["input_ids"].flatten().tensor_split(starts[1:])
