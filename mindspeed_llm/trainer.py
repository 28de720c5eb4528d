"""The training run, from configuration to exported model, readable from top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch

from mindspeed_llm.accumulate import StepCounts, count_step, forward_backward
from mindspeed_llm.batch import num_targets, to_device
from mindspeed_llm.checkpoint.checkpointer import Checkpointer, TrainingState
from mindspeed_llm.checkpoint.export import export_hf
from mindspeed_llm.config import Config, validate_world
from mindspeed_llm.config.changes import changes_since
from mindspeed_llm.data.collate import Batch, padding_token
from mindspeed_llm.data.factory import DataFactory
from mindspeed_llm.data.loader import EvalLoader
from mindspeed_llm.data.render import render_sample
from mindspeed_llm.data.training_loader import training_loader
from mindspeed_llm.errors import ConfigError, DivergedError
from mindspeed_llm.flops import count_training_flops
from mindspeed_llm.foundation import device as devices
from mindspeed_llm.foundation.distributed import Distributed, start
from mindspeed_llm.foundation.profiler import profile_steps
from mindspeed_llm.foundation.seed import set_seed
from mindspeed_llm.foundation.signals import StopRequest, stop_on_signal
from mindspeed_llm.logging import logger, set_up_logging
from mindspeed_llm.loss import cross_entropy_sum
from mindspeed_llm.metrics import Metrics, NoMetrics
from mindspeed_llm.models.factory import ModelFactory
from mindspeed_llm.models.fused import fuse_operators
from mindspeed_llm.models.initialize import initialize_weights
from mindspeed_llm.models.loading import load_weights
from mindspeed_llm.models.loss_head import fuse_loss
from mindspeed_llm.optim.clip import clip_coefficient, clip_gradients_as_torch, gradient_norm
from mindspeed_llm.optim.optimizer import OptimizerFactory
from mindspeed_llm.optim.scheduler import SchedulerFactory, count_steps, set_step
from mindspeed_llm.output_lock import only_writer
from mindspeed_llm.parallel.context.sharder import ContextSharder
from mindspeed_llm.parallel.fsdp import DTYPES
from mindspeed_llm.parallel.mesh import build_meshes
from mindspeed_llm.parallel.parallelize import parallelize
from mindspeed_llm.routing import BiasBalancing, ExpertLoad, fix_routing, worst_load
from mindspeed_llm.sample import sample_answer


def train(config: Config) -> None:
    """Run the whole configuration on this rank: build, train, export."""
    with start() as distributed, only_writer(Path(config.training.output_dir), distributed):
        set_up_logging(distributed.rank)
        trainer = Trainer(config, distributed)
        trainer.resume()
        with stop_on_signal(config.training.save_on_signal) as stop:
            finished = trainer.train(stop)
        if finished:
            trainer.export()


class Trainer:
    """Owns everything that a run is made of, and the loop over it."""

    def __init__(self, config: Config, distributed: Distributed) -> None:
        self.config = validate_world(config, distributed.world_size)
        self.distributed = distributed
        self.device = distributed.device
        self.output_dir = Path(config.training.output_dir)
        self.parity = config.training.parity
        self.aux_loss_coefficient = config.training.router_aux_loss_coef or 0.0
        self.step = 0  # optimizer steps done
        self.nonfinite_steps = 0  # the last so many in a row were skipped
        set_seed(config.training.seed, deterministic=config.training.deterministic)
        self.checkpointer = Checkpointer(
            self.output_dir, config.training.save_total_limit, model_only=config.training.save_only_model
        )
        self.starting_point = self.checkpointer.starting_point(config.training.resume_from_checkpoint)
        self._make_output_dir(config)
        self._build_data()
        self._build_model()
        self._build_optimizer()

    # ---- construction -------------------------------------------------------------------------------------------

    def _make_output_dir(self, config: Config) -> None:
        """The configuration is kept as the user gave it, so that it also fits another number of ranks."""
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            if self.distributed.is_main:
                kept = self.output_dir / "config.yaml"
                changes = changes_since(kept, config) if self.starting_point else []
                if changes:
                    logger.warning("this run goes on with other settings than before: %s", "; ".join(changes))
                kept.write_text(config.dump_yaml(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"training.output_dir: cannot write into {self.output_dir}: {error}") from None

    def _build_data(self) -> None:
        training = self.config.training
        self.model_factory = ModelFactory(self.config.model)
        self.tokenizer = self.model_factory.create_tokenizer()
        factory = DataFactory(self.config, self.tokenizer)
        self.data = data = factory.create()
        self.end_of_answers = factory.end_of_answers
        logger.info("%s\n%s", data.report, render_sample(data.first_row, self.tokenizer))
        options: dict[str, Any] = {
            "pad_token_id": padding_token(self.tokenizer),
            # The ranks of a context-parallel group, which are neighbours, get the same rows and cut them.
            "rank": self.distributed.rank // self.config.parallel.cp_size,
            "world_size": self.distributed.world_size // self.config.parallel.cp_size,
            "num_workers": training.dataloader_num_workers,
        }
        self.loader = training_loader(data, training, gather=self.distributed.gather, **options)
        self.eval_loaders = {
            name: EvalLoader(rows, batch_size=training.per_device_eval_batch_size, quirks=data.quirks, **options)
            for name, rows in data.eval.items()
        }
        self.steps_per_epoch = len(self.loader) / data.epochs
        self.total_steps = count_steps(training, self.steps_per_epoch)

    def _build_model(self) -> None:
        """On the meta device first; weights go straight into the shards once the model is cut."""
        model = self.model_factory.create()
        self.data.check_vocabulary(len(cast(torch.Tensor, model.get_input_embeddings().weight)))
        self.flops = count_training_flops(model)
        self.peak_flops = devices.peak_flops(self.device, DTYPES[self.config.parallel.param_dtype])
        fuse_operators(model, self.config, self.device)
        if self.parity == "none" and self.config.optimization.chunk_loss_size != 0:
            fuse_loss(model, self.config.optimization.chunk_loss_size)
        self.meshes = build_meshes(self.config.parallel, self.distributed.world_size, self.device)
        self.sharder = ContextSharder.of(self.meshes.context)
        parallelize(model, self.meshes, self.config.parallel, compiled=self.config.training.compile)
        if self.config.model.train_from_scratch:
            initialize_weights(model, self.config.training.seed, self.device)
        else:
            load_weights(model, self.config.model.model_name_or_path, self.device)
        self.model = model
        if self.config.optimization.fix_router:
            fix_routing(model)
        self.expert_load = ExpertLoad(model)
        rate = self.config.training.router_bias_update_rate
        self.balancing = BiasBalancing(model, rate) if rate else None

    def _build_optimizer(self) -> None:
        self.optimizer = OptimizerFactory(self.config.training).create(self.model)
        self.scheduler = SchedulerFactory(self.config.training).create(self.optimizer, self.total_steps)

    # ---- the loop -----------------------------------------------------------------------------------------------

    def train(self, stop: StopRequest) -> bool:
        """Take the remaining steps. Returns False when a signal ended the run early (a checkpoint is then written)."""
        save_steps = self.config.training.save_steps
        eval_steps = self.config.training.eval_steps or math.ceil(self.steps_per_epoch)
        profiled = profile_steps(self.config.training, self.distributed.rank, self.device)
        with self._metrics() as metrics, profiled as before_step:
            for window in self._windows():
                before_step(self.step)
                record = self.train_step(window, stop)
                stopping, last = record.pop("stop"), self.step == self.total_steps
                if self._is_due(eval_steps) or last:
                    record |= self.evaluate()
                metrics.log(record)
                if stopping or self._is_due(save_steps) or (last and save_steps):
                    self.save()
                if stopping and not last:
                    logger.info("stopped by a signal after step %d; resume_from_checkpoint: auto goes on", self.step)
                    return False
        return True

    def train_step(self, window: list[Batch], stop: StopRequest) -> dict:
        """One optimizer step over the micro-batches of ``window``; returns its record of metrics."""
        started = time.perf_counter()
        learning_rate = self.optimizer.param_groups[0]["lr"]
        counts = count_step(window, self.distributed, self.parity, self.sharder)
        loss, aux_loss = forward_backward(
            self.model, window, counts, self.aux_loss_coefficient, self.parity, self.sharder
        )
        grad_norm, clip = self._clip()
        local = [loss, aux_loss, float(stop.requested), *self.expert_load.take()]
        loss, aux_loss, stopping, *load = self.distributed.sum(local)
        loads = self.expert_load.by_layer(load)
        if self.parity == "llamafactory":  # it logs what it optimizes
            loss += self.aux_loss_coefficient * aux_loss
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if finite:
            self.optimizer.step(gradient_scale=clip)
            if self.balancing is not None:
                self.balancing.update(loads)
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.step += 1
        self._watch_nonfinite(finite)
        devices.synchronize(self.device)
        record = self._record(counts, loss, aux_loss, grad_norm, learning_rate, time.perf_counter() - started)
        if loads:
            record["expert_load"] = worst_load(loads)
        return record | {"stop": stopping > 0}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss per target over every row of each evaluation set; LLaMA-Factory averages the means of batches."""
        self.model.eval()
        losses = {}
        for name, loader in self.eval_loaders.items():
            total, weight = 0.0, 0.0
            for batch in loader:
                targets, rows = num_targets(batch), len(batch["labels"])
                part = to_device(self.sharder.shard_batch(batch), self.device)
                loss = cross_entropy_sum(self.model, part)[0].item()
                if self.parity == "llamafactory" and targets:
                    loss, targets = loss / targets * rows, rows
                total, weight = total + loss, weight + targets
            total, weight = self.distributed.sum([total, weight])
            key = "eval_loss" if len(self.eval_loaders) == 1 else f"eval_loss_{name}"
            # Each rank of a context-parallel group had a part of the loss and counted the whole rows.
            losses[key] = total / weight * self.sharder.num_ranks if weight else math.nan
        self.model.train()
        return losses

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Go on from ``training.resume_from_checkpoint``."""
        if self.starting_point is not None:
            self.checkpointer.load(self.starting_point, self._state())
            logger.info("resumed from %s after step %d", self.starting_point, self.step)
            if self.step >= self.total_steps:
                logger.warning("nothing is left to train: the run has %d steps in all", self.total_steps)

    def save(self) -> None:
        """Write a checkpoint of this step, unless there is one."""
        self.checkpointer.save(self.step, self._state())

    def export(self) -> None:
        """Write the trained model as a Hugging Face folder, and show what it answers now."""
        training, folder = self.config.training, self.output_dir / "hf"
        if not training.save_hf_weights:
            return
        export_hf(self.model, self.tokenizer, folder, end_of_answers=self.end_of_answers)
        logger.info("exported to %s", folder)
        if training.sample_prompt is not None and self.distributed.is_main:
            answer = sample_answer(
                folder,
                training.sample_prompt,
                chat=training.stage == "sft",
                trust_remote_code=self.config.model.trust_remote_code,
            )
            print(f"> {training.sample_prompt}\n{answer}")

    def state_dict(self) -> dict:
        return {"step": self.step}

    def load_state_dict(self, state: dict) -> None:
        self.step = state["step"]
        set_step(self.scheduler, self.step)

    def _state(self) -> TrainingState:
        return TrainingState(self.model, self.optimizer, {"trainer": self, "loader": self.loader})

    # ---- small parts --------------------------------------------------------------------------------------------

    def _windows(self) -> Iterator[list[Batch]]:
        """Micro-batches of every step that is left, epoch after epoch."""
        while self.step < self.total_steps:
            for window in self.loader:
                yield window
                if self.step == self.total_steps:
                    return

    def _clip(self) -> tuple[float, float]:
        """The gradients' norm, and what to scale them by. LLaMA-Factory's are scaled here, by torch's own function."""
        parameters, max_norm = list(self.model.parameters()), self.config.training.max_grad_norm
        if self.parity == "llamafactory":
            return clip_gradients_as_torch(parameters, max_norm), 1.0
        norm = gradient_norm(parameters)
        return norm, clip_coefficient(norm, max_norm)

    def _metrics(self) -> Metrics | NoMetrics:
        if not self.distributed.is_main:
            return NoMetrics()
        return Metrics(
            self.output_dir,
            first_step=self.step,
            total_steps=self.total_steps,
            logging_steps=self.config.training.logging_steps,
        )

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _watch_nonfinite(self, finite: bool) -> None:
        """A step that is not finite was skipped on all ranks; too many in a row mean that the run is broken."""
        self.nonfinite_steps = 0 if finite else self.nonfinite_steps + 1
        if finite:
            return
        limit = self.config.training.max_nonfinite_steps
        logger.warning("step %d skipped: loss or gradient norm is not finite", self.step)
        if self.nonfinite_steps > limit:
            raise DivergedError(
                f"{self.nonfinite_steps} steps in a row with a loss or gradient norm that is not finite "
                f"(training.max_nonfinite_steps is {limit}): lower training.lr or look at the data"
            )

    def _record(
        self, counts: StepCounts, loss: float, aux_loss: float, grad_norm: float, learning_rate: float, seconds: float
    ) -> dict:
        flops = self.flops.of(counts.tokens, counts.attended_pairs)
        peak = self.peak_flops and self.peak_flops * self.distributed.world_size
        record = {
            "step": self.step,
            "epoch": round(self.step / self.steps_per_epoch, 6),
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": learning_rate,
            "tokens": int(counts.tokens),
            "label_tokens": int(counts.targets),
            "step_time": seconds,
            "tokens_per_second": counts.tokens / seconds,
            "mfu": flops / seconds / peak if peak else None,
            "memory_gib": devices.peak_memory_gib(self.device),
        }
        if self.aux_loss_coefficient:
            record["aux_loss"] = aux_loss
        return record
