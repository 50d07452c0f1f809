"""One training run: steps, checks on the validation set, early stopping, a test with the best weights.

On accelerate: one process, or several under torchrun. All that a run writes is in one folder: `run.json` (what decides
its numbers), `records.jsonl` (a line for each check, and one for the result), `checkpoint.pt`, `tensorboard`, and at
the end `model`, which `from_pretrained` loads.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import gather_object
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from lra import checkpoint
from lra.checkpoint import State
from lra.data.batches import Batch, Order, evaluation_order, micro_batches
from lra.data.store import Split, open_store
from lra.files import exclusive
from lra.job import (
    BAG_OF_TOKENS,
    MODEL,
    RECORDS,
    SETTINGS,
    Job,
    data_checksum,
    make_model,
    open_task,
    result_of,
    run_fields,
    settings_of,
)
from lra.memory import largest_micro_batch, process_peak, step_peak
from lra.model import attention_errors, save_model
from lra.parallel import form_ranks, set_sequence_group
from lra.recipes import learning_rate
from lra.records import Record
from lra.timing import timed
from skeinformer.attention import METHODS
from skeinformer.cli.progress import progress_bar
from skeinformer.cli.records import append, machine, now, to_line, write_file

ESTIMATED = 8  # validation examples on which the attention's error is estimated at each check


def train(job: Job, console: Console | None = None, on_step: Callable[[int], None] = lambda step: None) -> Record:
    """Run `job` to its end, from its last checkpoint if it resumes, and return the record of its result.

    Args:
        job: What to train.
        console: Where the progress is shown; None shows nothing.
        on_step: Called after each step with its number.

    Returns:
        The record of the result; that of an earlier call if the folder of the job has one.

    Raises:
        ValueError: The data, the folder or the checkpoint is not of this job, or a loss is not finite.
    """
    row = METHODS.get(job.method.method)
    # without queries and keys in the output, their projections have no gradient
    unused = row is not None and not row.reads_queries
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16" if job.precision == "bfloat16" else "no",
        log_with="tensorboard",
        project_dir=job.out,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=unused)],
    )
    trainer = Trainer(job, accelerator, console or Console(quiet=True), on_step)
    with exclusive(job.out) if trainer.is_main else nullcontext():
        if (result := trainer.finished()) is not None:
            return result
        trainer.start()
        with trainer.bar:
            while not trainer.is_over():
                trainer.training_steps()
                trainer.check()
            return trainer.finish()


class Trainer:
    """The parts of a run that its stages share."""

    def __init__(self, job: Job, accelerator: Accelerator, console: Console, on_step: Callable[[int], None]) -> None:
        self.job, self.accelerator, self.on_step, self.recipe = job, accelerator, on_step, job.recipe
        self.is_main = accelerator.is_main_process
        self.ranks = form_ranks(
            accelerator.num_processes, accelerator.process_index, job.sequence_parallel, accelerator.device.type
        )
        if self.recipe.batch % self.ranks.data_parallel:
            parts = f"{self.ranks.data_parallel} {'processes' if self.ranks.group is None else 'groups'}"
            raise ValueError(f"batch={self.recipe.batch} is not a multiple of the {parts}")
        self.store = open_task(job)
        self.share = slice(self.ranks.data_rank, None, self.ranks.data_parallel)  # of every batch
        self.state = State(started=now())
        self.console, self.bar = console, progress_bar(console)
        self.task = self.bar.add_task("training", total=self.recipe.steps)
        torch.manual_seed(job.seed)
        self.model = make_model(job, self.store.meta).to(accelerator.device)
        set_sequence_group(self.model, self.ranks.group)

    def finished(self) -> Record | None:
        """Return the result, if this very run has one; a ValueError where the folder has another run."""
        result = result_of(self.job)
        if result is not None:
            checkpoint.remove(self.job.out)  # which a kill may have left
            self.console.print("done before; nothing is run again")
        elif (self.job.out / SETTINGS).is_file() and not self.job.resume:
            raise ValueError(f"{self.job.out} holds an unfinished run; --resume continues it, or give another --out")
        return result

    def start(self) -> None:
        """Find the micro-batch, and go to the last checkpoint if there is one."""
        job, recipe = self.job, self.recipe
        saved = checkpoint.load(job.out) if job.resume else None
        self.train_split, self.valid_split = self.store.split("train"), self.store.split("valid")
        self.order = Order(self.train_split, recipe.batch, job.seed, bucket=recipe.bucket)
        self.state.micro_batch = saved["progress"]["micro_batch"] if saved else self.find_micro_batch()
        optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay, fused=True
        )
        prepared: nn.Module = torch.compile(self.model) if job.compile else self.model  # type: ignore[assignment]
        self.prepared, self.optimizer = self.accelerator.prepare(prepared, optimizer)
        self.best = self.weights()
        # ranks of one group draw alike
        torch.manual_seed(job.seed * self.ranks.data_parallel + self.ranks.data_rank)
        if saved:
            self.restore(saved)
        if self.is_main:
            settings = settings_of(job, self.store)
            write_file(job.out / SETTINGS, json.dumps(settings, indent=1) + "\n")
            # what came after the checkpoint comes again
            write_file(job.out / RECORDS, "".join(map(to_line, self.state.records)))
            purge = {"tensorboard": {"purge_step": self.state.step or None}}
            self.accelerator.init_trackers("tensorboard", init_kwargs=purge)
            for record in self.state.records[-1:]:  # a kill may have come before it was written
                self.write_scalars(record)
        self.bar.update(self.task, completed=self.state.step)

    def restore(self, saved: checkpoint.Checkpoint) -> None:
        """Set everything to a checkpoint. The store is compared with its checksums first."""
        path = self.job.out / checkpoint.FILE
        open_store(self.job.data, verify=True)
        if len(saved["random"]) != self.ranks.processes:
            raise ValueError(f"{path} was written by {len(saved['random'])} processes; resume with as many")
        try:
            self.model.load_state_dict(saved["weights"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.state, self.best = State(**saved["progress"]), saved["best"]
            checkpoint.set_random_state(saved["random"][self.ranks.process])
        except (RuntimeError, KeyError, TypeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{path} does not fit this run ({reason}); remove it to start from step 0") from None
        self.console.print(f"continues after step {self.state.step:,}")

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the model's weights on the CPU."""
        return {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}

    def is_over(self) -> bool:
        return self.state.step >= self.recipe.steps or self.state.checks_since_best >= self.recipe.patience

    def training_steps(self) -> None:
        """Train up to the next check."""
        state, recipe = self.state, self.recipe
        self.prepared.train()
        self.loss = torch.zeros((), device=self.accelerator.device)
        self.tokens = 0
        last = min(recipe.steps, (state.step // recipe.check_every + 1) * recipe.check_every)
        self.steps_since_check = last - state.step
        with timed(compiled=self.job.compile) as spent:
            while state.step < last:
                self.training_step()
                state.step += 1
                state.examples += recipe.batch
                self.bar.update(self.task, completed=state.step)
                self.on_step(state.step)
            if self.accelerator.device.type == "cuda":
                torch.cuda.synchronize()
        self.seconds_since_check = spent.seconds
        state.seconds += spent.seconds
        state.compile_seconds += spent.compile_seconds
        state.cpu_seconds += self.sum_of(spent.cpu_seconds)

    def training_step(self) -> None:
        """One step of the optimizer on the recipe's batch, in micro-batches whose gradients add up to its mean."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe, self.state.step)
        self.optimizer.zero_grad(set_to_none=True)
        share = self.recipe.batch // self.ranks.data_parallel
        remaining = share
        for batch in self.batches(self.train_split, self.order.indices(self.state.step)):
            remaining -= len(batch.labels)
            with nullcontext() if remaining == 0 else self.accelerator.no_sync(self.prepared):
                loss = F.cross_entropy(self.prepared(*batch.arguments).float(), batch.labels, reduction="sum") / share
                self.accelerator.backward(loss)
            self.loss += loss.detach()
            self.tokens += batch.real_tokens
        self.optimizer.step()

    def batches(self, split: Split, indices: "np.ndarray[Any, np.dtype[np.int64]]") -> Iterator[Batch]:
        for batch in micro_batches(split, indices, self.share, self.state.micro_batch, self.recipe.max_len):
            yield batch.to(self.accelerator.device)

    def check(self) -> None:
        """Look at the validation set, keep the weights if they are the best so far, write record and checkpoint."""
        state = self.state
        start = time.perf_counter()
        loss = float(self.total(self.loss)) / self.ranks.processes / self.steps_since_check
        valid_loss, valid_accuracy, _ = self.evaluate("validation", self.valid_split, self.recipe.valid_examples)
        for name, value in (("training", loss), ("validation", valid_loss)):
            if not math.isfinite(value):
                raise ValueError(f"the {name} loss is {value} at step {state.step:,}; lower the learning rate")
        better = (valid_accuracy, -valid_loss) > (state.best_accuracy, -state.best_loss)
        if better:
            state.best_step, state.best_accuracy, state.best_loss = state.step, valid_accuracy, valid_loss
            self.best = self.weights()
        state.checks_since_best = 0 if better else state.checks_since_best + 1
        tokens = self.sum_of(self.tokens) / self.ranks.sequence_parallel  # ranks of a group count the same ones
        state.check_seconds += time.perf_counter() - start
        record: Record = {
            "kind": "lra_check",
            **run_fields(self.job),
            "step": state.step,
            "loss": loss,
            "valid_loss": valid_loss,
            "valid_accuracy": valid_accuracy,
            "seconds": state.seconds,
            "cpu_seconds": state.cpu_seconds,
            "compile_seconds": state.compile_seconds,
            "tokens_per_second": tokens / max(self.seconds_since_check, 1e-9),
            "peak_bytes": int(self.sum_of(process_peak(self.accelerator.device))),
            "learning_rate": learning_rate(self.recipe, state.step - 1),
            "sequence_parallel": self.ranks.sequence_parallel,
            **self.attention_errors(),
        }
        state.records.append(record)
        self.save_checkpoint()
        if self.is_main:
            append(self.job.out / RECORDS, record)
        self.write_scalars(record)
        self.console.print(
            f"step {state.step:,}: loss {loss:.4f}, validation {valid_loss:.4f}, accuracy {valid_accuracy:.4f}; "
            f"{state.seconds:.0f} s, {record['tokens_per_second']:,.0f} tokens/s",
            highlight=False,
        )

    def save_checkpoint(self) -> None:
        """Write the checkpoint; every process gives its random state."""
        states = gather_object([checkpoint.random_state()])
        if self.is_main:
            saved = {"weights": self.model.state_dict(), "best": self.best, "optimizer": self.optimizer.state_dict()}
            checkpoint.save(self.job.out, {**saved, "random": states, "progress": asdict(self.state)})
        self.accelerator.wait_for_everyone()

    def total(self, x: Tensor) -> Tensor:
        """Return the sum over all processes."""
        summed: Tensor = self.accelerator.reduce(x, reduction="sum")
        return summed

    def sum_of(self, value: float) -> float:
        """Return the sum of a number over all processes."""
        return float(self.total(torch.tensor(value, dtype=torch.float64, device=self.accelerator.device)))

    @torch.no_grad()
    def evaluate(self, stage: str, split: Split, count: int | None) -> tuple[float, float, int]:
        """Return mean loss, accuracy and number of examples: every example once, by all processes together."""
        self.prepared.eval()
        self.bar.update(self.task, description=stage)
        sums = torch.zeros(3, dtype=torch.float64, device=self.accelerator.device)
        for indices in evaluation_order(split, self.recipe.batch, count):
            for batch in self.batches(split, indices):
                with self.accelerator.autocast():
                    # without DistributedDataParallel, whose processes would wait for each other
                    logits = self.model(*batch.arguments).float()
                right = (logits.argmax(-1) == batch.labels).sum()
                loss = F.cross_entropy(logits, batch.labels, reduction="sum")
                sums += torch.stack([loss.double(), right.double(), torch.tensor(float(len(logits))).to(sums)])
        self.bar.update(self.task, description="training")
        loss_sum, right_sum, examples = self.total(sums).tolist()
        return loss_sum / examples, right_sum / examples, int(examples) // self.ranks.sequence_parallel

    @torch.no_grad()
    def attention_errors(self) -> Record:
        """Estimate the error of each layer's attention on a few validation examples."""
        self.prepared.eval()
        indices = evaluation_order(self.valid_split, ESTIMATED, ESTIMATED)[0]
        (batch,) = micro_batches(self.valid_split, indices, slice(None), ESTIMATED, self.recipe.max_len)
        with self.accelerator.autocast():
            return attention_errors(self.model, batch.to(self.accelerator.device).arguments)

    def finish(self) -> Record:
        """Test the best weights, save them as a model, write the result."""
        self.model.load_state_dict(self.best)
        loss, accuracy, examples = self.evaluate("test", self.store.split("test"), self.recipe.test_examples)
        record = self.result({"test_accuracy": accuracy, "test_loss": loss, "test_examples": examples})
        self.write_scalars({"step": self.state.step, "test_accuracy": accuracy, "test_loss": loss})
        for tracker in self.accelerator.trackers:
            tracker.finish()
        if self.is_main:
            save_model(self.model, self.job.out / MODEL, record)
            append(self.job.out / RECORDS, record)
            checkpoint.remove(self.job.out)
        self.accelerator.wait_for_everyone()
        return record

    def result(self, test: Record) -> Record:
        """Return the record of the run."""
        state, recipe, job = self.state, self.recipe, self.job
        labels = self.store.split("test").labels
        return {
            "kind": "lra_baseline" if job.method == BAG_OF_TOKENS else "lra_run",
            **run_fields(job),
            "data": self.store.meta.source,
            "n": recipe.max_len,
            "budget": job.sized.budget,
            "batch": recipe.batch,
            "micro_batch": state.micro_batch,
            "accumulation": -(-recipe.batch // self.ranks.data_parallel // state.micro_batch),
            "memory_budget": job.memory_budget,
            "learning_rate": recipe.learning_rate,
            "max_steps": recipe.steps,
            "steps": state.step,
            "best_step": state.best_step,
            "stopped": "patience" if state.checks_since_best >= recipe.patience else "steps",
            "seconds": state.seconds,
            "cpu_seconds": state.cpu_seconds,
            "compile_seconds": state.compile_seconds,
            "seconds_total": state.seconds + state.compile_seconds + state.check_seconds,
            "seconds_per_thousand_steps": 1000 * state.seconds / state.step,
            "valid_accuracy": state.best_accuracy,
            "valid_loss": state.best_loss,
            **test,
            "majority": float((labels == np.bincount(self.train_split.labels).argmax()).mean()),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "peak_bytes": int(self.sum_of(process_peak(self.accelerator.device))),
            "examples_seen": state.examples,
            "processes": self.ranks.processes,
            "sequence_parallel": self.ranks.sequence_parallel,
            "device": self.accelerator.device.type,
            "precision": job.precision,
            "compile": job.compile,
            "data_sha256": data_checksum(self.store),
            **self.attention_errors(),
            "started": state.started,
            **machine(),
        }

    def find_micro_batch(self) -> int:
        """Return the examples that a process holds at once: as asked, or the most that fit, or all of its share."""
        share = self.recipe.batch // self.ranks.data_parallel
        if self.job.micro_batch is not None:
            return min(self.job.micro_batch, share)
        if self.job.memory_budget is None:
            return share
        device = self.accelerator.device
        length = min(self.store.meta.max_len, self.recipe.max_len)

        def peak(examples: int) -> int:
            with self.accelerator.autocast():
                used = step_peak(self.model, self.store.meta, examples, length, device)
            # the most of any process: all try the same numbers then, and come to the same one
            return int(self.accelerator.gather(torch.tensor([used], device=device)).max())

        self.model.train()
        random = checkpoint.random_state()
        weights = sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())
        micro = largest_micro_batch(peak, share, self.job.memory_budget, fixed=3 * weights)  # itself, and two moments
        checkpoint.set_random_state(random)
        return micro

    def write_scalars(self, record: Record) -> None:
        """Write the numbers of a check, or of the test, as TensorBoard scalars."""
        numbers = {name: x for name, x in record.items() if isinstance(x, float) or name == "peak_bytes"}
        self.accelerator.log(numbers, step=record["step"])
