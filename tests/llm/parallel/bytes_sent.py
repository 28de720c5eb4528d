"""Counts what this rank sends to others, below everything that sends: at the collective operators themselves."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_llm.parallel.context.ring import attend

c10d, functional = torch.ops.c10d, torch.ops._c10d_functional


class BytesSent(TorchDispatchMode):
    """While it is entered, ``by_kind`` adds up the bytes that leave this rank for others.

    An algorithm may send the same more often, but not less: all-gather its shard to everyone, reduce-scatter all shards
    but its own, all-reduce one and then the other, all-to-all the rows of the others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_kind: dict[str, int] = defaultdict(int)

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.mindspeed_llm.ring_attention.default:
            with self:  # what it sends is inside
                return attend(*args, **(kwargs or {}))
        if func is c10d._allgather_base_.default:
            _, shard, group, *_ = args
            self._add("all_gather", shard.nbytes * (_of(group).size() - 1))
        elif func is c10d._reduce_scatter_base_.default:
            shard, _, group, *_ = args
            self._add("reduce_scatter", shard.nbytes * (_of(group).size() - 1))
        elif func is c10d.allreduce_.default:
            (tensor,), group, *_ = args
            self._add("all_reduce", 2 * tensor.nbytes * (_of(group).size() - 1) // _of(group).size())
        elif func is c10d.send.default:
            (tensor,), *_ = args
            self._add("send", tensor.nbytes)
        elif func is functional.all_to_all_single.default:
            rows, _, send_sizes, name = args
            if len(rows):
                others = len(rows) - send_sizes[_resolve_process_group(name).rank()]
                self._add("all_to_all", rows.nbytes // len(rows) * others)
        elif func.namespace in ("c10d", "_c10d_functional") and func not in _SENDS_NOTHING:
            raise NotImplementedError(f"{func} is not counted")
        return func(*args, **(kwargs or {}))

    def _add(self, kind: str, size: int) -> None:
        self.by_kind[kind] += size


_SENDS_NOTHING = {c10d.recv_.default, functional.wait_tensor.default}


def _of(boxed: torch.ScriptObject) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(boxed)
