"""One training run: steps, checks on the validation set, early stopping, a test with the best weights.

On accelerate: one process, or several under torchrun. Everything that a run writes lies in one folder: `run.json` (what
it is), `records.jsonl` (a line for each check, and one for the result), `checkpoint-<step>`, `tensorboard`, and at the
end `model`, which `from_pretrained` loads.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.nn import functional as F

from skeinformer.lab.contender import OFFERED, has_budget
from skeinformer.lab.files import lock_folder, write_whole
from skeinformer.lab.lra.batches import Batch, Order, evaluation_order, micro_batches
from skeinformer.lab.lra.store import Split, open_store
from skeinformer.lab.records import Record, append, machine
from skeinformer.lab.training import checkpoint
from skeinformer.lab.training.job import (
    BAG_OF_TOKENS,
    MODEL,
    RECORDS,
    RUN,
    Job,
    Progress,
    open_task,
    read_progress,
    result_of,
    run_fields,
    settings,
    tokens_checksum,
)
from skeinformer.lab.training.make import attention_errors, make_model, save_trained
from skeinformer.lab.training.memory import largest_micro_batch, process_peak, step_peak
from skeinformer.lab.training.observer import Observer
from skeinformer.lab.training.ranks import divide, form_ranks
from skeinformer.lab.training.recipes import learning_rate
from skeinformer.lab.training.spent import spent
from skeinformer.lab.work import now

ESTIMATED = 8  # validation examples on which the attention's error is estimated at each check


def train(job: Job, watch: Observer | None = None) -> Record:
    """Run `job` to its end, from its last checkpoint if it resumes, and return the record of its result."""
    watch = watch or Observer()
    row = OFFERED.get(job.method.method)
    # without queries and keys in the output, their projections have no gradient
    unused = row is not None and not row.reads_queries
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16" if job.precision == "bfloat16" else "no",
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=unused)],
    )
    run = Run(job, accelerator, watch)
    with run.alone():
        if (finished := run.finished()) is not None:
            return finished
        run.start()
        with run.tensorboard() as write_scalars:
            while not run.is_over():
                run.training_steps()
                run.check(write_scalars)
            return run.finish(write_scalars)


class Run:
    """The parts of a run that its stages share."""

    def __init__(self, job: Job, accelerator: Accelerator, watch: Observer) -> None:
        self.job, self.accelerator, self.watch, self.recipe = job, accelerator, watch, job.recipe
        self.ranks = form_ranks(
            accelerator.num_processes, accelerator.process_index, job.sequence_parallel, accelerator.device.type
        )
        if self.recipe.batch % self.ranks.rows:
            parts = f"{self.ranks.rows} processes" if self.ranks.group is None else f"{self.ranks.rows} groups"
            raise ValueError(f"batch={self.recipe.batch} is not a multiple of the {parts}")
        self.store = open_task(job)
        self.share = slice(self.ranks.row, None, self.ranks.rows)  # of every batch
        self.progress = Progress(started=now())
        self.settings = settings(job, self.store)
        torch.manual_seed(job.seed)
        self.model = make_model(job.method, job.recipe, self.store.meta, job.seed).to(accelerator.device)
        divide(self.model, self.ranks.group)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the run's folder: a second `train` on it is a ValueError."""
        if self.ranks.process:
            yield
            return
        self.job.out.mkdir(parents=True, exist_ok=True)
        try:
            with lock_folder(self.job.out, wait=False):
                yield
        except BlockingIOError as error:
            raise ValueError(f"{self.job.out} is in use: another process trains there") from error

    def finished(self) -> Record | None:
        """The result, if this very run has one; a ValueError where the folder holds another run."""
        result = result_of(self.job)
        if result is not None:
            checkpoint.remove(self.job.out)  # which a kill may have left
            self.watch.stage("done before; nothing is run again")
        elif (self.job.out / RUN).is_file() and not self.job.resume:
            raise ValueError(f"{self.job.out} holds an unfinished run; --resume continues it, or give another --out")
        return result

    def start(self) -> None:
        """Find the micro-batch, and go to the last checkpoint if there is one."""
        job, recipe = self.job, self.recipe
        self.train_split, self.valid_split = self.store.split("train"), self.store.split("valid")
        self.order = Order(self.train_split, recipe.batch, job.seed, bucket=recipe.bucket)
        self.progress.micro_batch = self.find_micro_batch()
        optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay, fused=True
        )
        prepared: nn.Module = torch.compile(self.model) if job.compile else self.model  # type: ignore[assignment]
        self.prepared, self.optimizer = self.accelerator.prepare(prepared, optimizer)
        self.best = self.weights()
        torch.manual_seed(job.seed * self.ranks.rows + self.ranks.row)  # ranks of one group draw alike
        self.restore()
        if self.accelerator.is_main_process:
            write_whole(json.dumps(self.settings, indent=1) + "\n", job.out / RUN)
            text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in self.progress.records)
            write_whole(text, job.out / RECORDS)  # what came after the checkpoint comes again
        title = f"{recipe.task}, {job.method.label}, seed {job.seed}"
        self.watch.begin(title, recipe.steps, self.progress.step)

    def restore(self) -> None:
        """Go to the last checkpoint. It and the store are compared with their checksums first."""
        path = checkpoint.newest_whole(self.job.out) if self.job.resume else None
        if path is None:
            return
        self.watch.stage("comparing checksums")
        open_store(self.job.data, verify=True)
        progress = read_progress(path, checkpoint.load_state(path)["progress"], self.recipe)
        self.best = checkpoint.restore_run(path, self.model, self.optimizer, self.ranks.process)
        self.progress = progress

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}

    def is_over(self) -> bool:
        return self.progress.step >= self.recipe.steps or self.progress.checks_since_best >= self.recipe.patience

    def training_steps(self) -> None:
        """Train up to the next check."""
        progress, recipe = self.progress, self.recipe
        self.prepared.train()
        self.loss = torch.zeros((), device=self.accelerator.device)
        self.tokens = 0
        last = min(recipe.steps, (progress.step // recipe.check_every + 1) * recipe.check_every)
        self.steps_since_check = last - progress.step
        with spent(compiled=self.job.compile) as time_spent:
            while progress.step < last:
                self.training_step()
                progress.step += 1
                progress.examples += recipe.batch
                self.watch.step(progress.step)
            if self.accelerator.device.type == "cuda":
                torch.cuda.synchronize()
        self.check_wall = time_spent.seconds
        progress.seconds += time_spent.seconds
        progress.compile_seconds += time_spent.compile_seconds
        progress.cpu_seconds += self.sum_of(time_spent.cpu_seconds)

    def training_step(self) -> None:
        """One step of the optimizer on the recipe's batch, in micro-batches whose gradients add up to its mean."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe, self.progress.step)
        self.optimizer.zero_grad(set_to_none=True)
        share = self.recipe.batch // self.ranks.rows
        left = share
        for batch in self.batches(self.train_split, self.order.indices(self.progress.step)):
            left -= len(batch.labels)
            with nullcontext() if left == 0 else self.accelerator.no_sync(self.prepared):
                loss = F.cross_entropy(self.prepared(*batch.arguments).float(), batch.labels, reduction="sum") / share
                self.accelerator.backward(loss)
            self.loss += loss.detach()
            self.tokens += batch.real_tokens
        self.optimizer.step()

    def batches(self, split: Split, indices: "np.ndarray[Any, np.dtype[np.int64]]") -> Iterator[Batch]:
        for batch in micro_batches(split, indices, self.share, self.progress.micro_batch, self.recipe.max_len):
            yield batch.to(self.accelerator.device)

    def check(self, write_scalars: Callable[[Record], None]) -> None:
        """Look at the validation set, keep the weights if they are the best so far, write record and checkpoint."""
        progress = self.progress
        start = time.perf_counter()
        loss = float(self.total(self.loss)) / self.ranks.processes / self.steps_since_check
        if not math.isfinite(loss):
            raise ValueError(f"the training loss is {loss} at step {progress.step:,}; lower the learning rate")
        valid_loss, valid_accuracy, _ = self.evaluate("validation", self.valid_split, self.recipe.valid_examples)
        if not math.isfinite(valid_loss):
            raise ValueError(f"the validation loss is {valid_loss} at step {progress.step:,}; lower the learning rate")
        better = (valid_accuracy, -valid_loss) > (progress.best_accuracy, -progress.best_loss)
        if better:
            progress.best_step, progress.best_accuracy, progress.best_loss = progress.step, valid_accuracy, valid_loss
            self.best = self.weights()
        progress.checks_since_best = 0 if better else progress.checks_since_best + 1
        tokens = self.sum_of(self.tokens) / self.ranks.degree  # the ranks of a group count the same ones
        progress.check_seconds += time.perf_counter() - start
        record: Record = {
            "kind": "lra_check",
            **run_fields(self.job),
            "step": progress.step,
            "loss": loss,
            "valid_loss": valid_loss,
            "valid_accuracy": valid_accuracy,
            "seconds": progress.seconds,
            "cpu_seconds": progress.cpu_seconds,
            "compile_seconds": progress.compile_seconds,
            "tokens_per_second": tokens / max(self.check_wall, 1e-9),
            "peak_bytes": self.peak(),
            "learning_rate": learning_rate(self.recipe, progress.step - 1),
            "sequence_parallel": self.ranks.degree,
            **self.attention_errors(),
        }
        progress.records.append(record)
        self.save_checkpoint()
        if self.accelerator.is_main_process:
            append(self.job.out / RECORDS, record)
            write_scalars(record)
        self.watch.check(record)

    def save_checkpoint(self) -> None:
        checkpoint.save(
            self.job.out,
            self.progress.step,
            weights=self.model.state_dict(),
            best=self.best,
            optimizer=self.optimizer,
            state=asdict(self.progress),
            process=self.ranks.process,
            barrier=self.accelerator.wait_for_everyone,
        )

    def total(self, x: Tensor) -> Tensor:
        """The sum over all processes."""
        summed: Tensor = self.accelerator.reduce(x, reduction="sum")
        return summed

    def sum_of(self, value: float) -> float:
        """The same of a number."""
        return float(self.total(torch.tensor(value, dtype=torch.float64, device=self.accelerator.device)))

    def peak(self) -> int:
        """The most bytes of each process so far, added up."""
        return int(self.sum_of(process_peak(self.accelerator.device)))

    @torch.no_grad()
    def evaluate(self, stage: str, split: Split, count: int | None) -> tuple[float, float, int]:
        """Mean loss, accuracy and number of examples: every example once, by all processes together."""
        self.prepared.eval()
        order = evaluation_order(split, self.recipe.batch, count)
        done, all_of_them = 0, sum(map(len, order))
        self.watch.stage(stage, done, all_of_them)
        sums = torch.zeros(3, dtype=torch.float64, device=self.accelerator.device)
        for indices in order:
            for batch in self.batches(split, indices):
                logits = self.model_output(batch).float()
                right = (logits.argmax(-1) == batch.labels).sum()
                loss = F.cross_entropy(logits, batch.labels, reduction="sum")
                sums += torch.stack([loss.double(), right.double(), torch.tensor(float(len(logits))).to(sums)])
            done += len(indices)
            self.watch.stage(stage, done, all_of_them)
        loss_sum, right_sum, examples = self.total(sums).tolist()
        return loss_sum / examples, right_sum / examples, int(examples) // self.ranks.degree

    def model_output(self, batch: Batch) -> Tensor:
        """Without DistributedDataParallel, whose processes would wait for each other."""
        with self.accelerator.autocast():
            output: Tensor = self.model(*batch.arguments)
        return output

    @torch.no_grad()
    def attention_errors(self) -> Record:
        self.prepared.eval()
        indices = evaluation_order(self.valid_split, ESTIMATED, ESTIMATED)[0]
        (batch,) = micro_batches(self.valid_split, indices, slice(None), ESTIMATED, self.recipe.max_len)
        with self.accelerator.autocast():
            return attention_errors(self.model, batch.to(self.accelerator.device).arguments)

    def finish(self, write_scalars: Callable[[Record], None]) -> Record:
        """Test the best weights, save them as a model, write the result."""
        progress, recipe, job = self.progress, self.recipe, self.job
        self.model.load_state_dict(self.best)
        test = self.store.split("test")
        test_loss, test_accuracy, test_examples = self.evaluate("test", test, recipe.test_examples)
        record: Record = {
            "kind": "lra_baseline" if job.method.method == BAG_OF_TOKENS else "lra_run",
            **run_fields(job),
            "data": self.store.meta.source,
            "n": recipe.max_len,
            "budget": recipe.budget if has_budget(job.method) else None,
            "batch": recipe.batch,
            "micro_batch": progress.micro_batch,
            "accumulation": -(-recipe.batch // self.ranks.rows // progress.micro_batch),
            "memory_budget": job.memory_budget,
            "learning_rate": recipe.learning_rate,
            "max_steps": recipe.steps,
            "steps": progress.step,
            "best_step": progress.best_step,
            "stopped": "patience" if progress.checks_since_best >= recipe.patience else "steps",
            "seconds": progress.seconds,
            "cpu_seconds": progress.cpu_seconds,
            "compile_seconds": progress.compile_seconds,
            "seconds_total": progress.seconds + progress.compile_seconds + progress.check_seconds,
            "seconds_per_thousand_steps": 1000 * progress.seconds / progress.step,
            "valid_accuracy": progress.best_accuracy,
            "valid_loss": progress.best_loss,
            "test_accuracy": test_accuracy,
            "test_loss": test_loss,
            "test_examples": test_examples,
            "majority": float((test.labels == np.bincount(self.train_split.labels).argmax()).mean()),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "peak_bytes": self.peak(),
            "examples_seen": progress.examples,
            "processes": self.ranks.processes,
            "sequence_parallel": self.ranks.degree,
            "device": self.accelerator.device.type,
            "precision": job.precision,
            "compile": job.compile,
            "data_sha256": tokens_checksum(self.store),
            **self.attention_errors(),
            "started": progress.started,
            **machine(),
        }
        if self.accelerator.is_main_process:
            write_scalars({"step": progress.step, "test_accuracy": test_accuracy, "test_loss": test_loss})
            save_trained(self.model, job.out / MODEL, record)
            append(job.out / RECORDS, record)
            checkpoint.remove(job.out)
        self.accelerator.wait_for_everyone()
        return record

    def find_micro_batch(self) -> int:
        """The examples that a process holds at once: as asked, or the most that fit, or all of its share."""
        share = self.recipe.batch // self.ranks.rows
        if self.job.micro_batch is not None:
            return min(self.job.micro_batch, share)
        if self.job.memory_budget is None:
            return share
        if self.job.resume and (path := checkpoint.newest_whole(self.job.out)) is not None:
            return read_progress(path, checkpoint.load_state(path)["progress"], self.recipe).micro_batch
        device = self.accelerator.device
        length = min(self.store.meta.max_len, self.recipe.max_len)

        def peak(examples: int) -> int:
            self.watch.stage(f"memory of {examples} examples")
            with self.accelerator.autocast():
                found = step_peak(self.model, self.store.meta, examples, length, device)
            # the most of any process: all try the same numbers then, and come to the same one
            return int(self.accelerator.gather(torch.tensor([found], device=device)).max())

        self.model.train()
        state = checkpoint.random_state()
        weights = sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())
        micro = largest_micro_batch(peak, share, self.job.memory_budget, fixed=3 * weights)  # itself, and two moments
        checkpoint.set_random_state(state)
        return micro

    @contextmanager
    def tensorboard(self) -> Iterator[Callable[[Record], None]]:
        """A function that writes the numbers of a check, or of the test, as TensorBoard scalars."""
        if not self.accelerator.is_main_process:
            yield lambda record: None
            return
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(self.job.out / "tensorboard"), purge_step=self.progress.step or None) as writer:

            def write(record: Record) -> None:
                step = record["step"]
                for name, value in record.items():
                    if isinstance(value, float) or name == "peak_bytes":
                        writer.add_scalar(name, value, step)
                writer.flush()

            for record in self.progress.records[-1:]:  # a kill may have come before it was written
                write(record)
            yield write
