"""One update from start to end: version n and a batch in, version n + 1 out.

Invariants:
1. An update is known by (run, iteration). If the version it makes is in storage, it is returned and nothing is done; one that was
   made of another batch is an error, for version n + 1 comes from version n and one batch.
2. Half-done work is never continued: the update starts again from version n as it is in storage (or in memory, untouched since).
3. The version's manifest is the last object written.
"""

import hashlib
import math
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from contracts.config import SftConfig, TrainingConfig
from contracts.identity import version_prefix
from contracts.updates import UpdateRequest, UpdateResult
from infra.storage import Storage
from trainer import algorithms, export
from trainer.batches import Batch, BatchError, read_batch, read_manifest
from trainer.engine import Engine

FINAL_SHARE = 0.1  # of the learning rate, at the end of a cosine schedule
Report = Callable[[str, int, int], None]  # phase, step, steps


@dataclass
class Warm:
    """The engine of the last update, whose weights and optimizer are those after making `version`."""

    run: str
    version: int
    settings: str
    engine: Engine


@dataclass
class Updater:
    """Carries out updates, one after another, in one thread."""

    storage: Storage
    work: Path
    _warm: Warm | None = field(default=None, init=False)

    def run(self, request: UpdateRequest, report: Report) -> UpdateResult:
        """Make the version, or find it. Raises BatchError for what will never succeed, other exceptions for what may."""
        clock = _Clock()
        manifest = read_manifest(self.storage, request.manifest)
        digest = hashlib.sha256(self.storage.read(request.manifest)).hexdigest()
        found = export.find_version(self.storage, request.run, request.version)
        if found is not None and found.result is not None:
            if found.batch_digest != digest:
                where = self.storage.url(version_prefix(request.run, request.version))
                raise RuntimeError(f"{where} was made of another batch: remove it to make it anew, or give the run another name")
            return found.result
        method = request.method
        if isinstance(method, TrainingConfig):
            if request.temperature <= 0:
                raise BatchError("sampling.temperature is 0: greedy answers have no probability to learn from")
            algorithms.check(method)
            options: dict[str, Any] = {"train_on_truncated": method.train_on_truncated, "min_group": algorithms.min_group(method)}
        else:
            options = {"min_reward": method.min_reward}
        report("load", 0, 0)
        batch = read_batch(self.storage, manifest, max_context=request.max_context, **options)
        base = export.fetch_version(self.storage, request.run, request.iteration, request.base_model, self.work)
        if not batch.rows:
            return self._carry_over(request, base, batch, digest, clock)
        engine = self._engine(request, base, batch)
        clock.lap("load")
        try:
            if isinstance(method, SftConfig):
                metrics = _imitate(engine, batch, method, request.seed, report)
                clock.lap("update")
            else:
                metrics = _reinforce(engine, batch, method, request, report, clock)
            report("save", 0, 0)
            result = self._export(request, engine, base, batch, metrics, digest, clock)
        except BaseException:
            self._warm = None
            raise
        self._warm = Warm(request.run, request.version, _settings(request), engine)
        return result

    def _engine(self, request: UpdateRequest, base: Path, batch: Batch) -> Engine:
        warm, self._warm = self._warm, None  # given back only by an update that succeeds
        if warm and (warm.run, warm.version, warm.settings) == (request.run, request.iteration, _settings(request)):
            return warm.engine
        del warm
        method = request.method
        steps = _sft_steps(batch, method) if isinstance(method, SftConfig) else 1
        engine = Engine(base, method, max_row=request.max_context, total_steps=steps)
        checkpoint = export.fetch_checkpoint(self.storage, request.run, request.iteration, _settings(request), self.work)
        if checkpoint is not None:
            engine.load(checkpoint)
        return engine

    def _export(
        self,
        request: UpdateRequest,
        engine: Engine,
        base: Path,
        batch: Batch,
        metrics: dict[str, float],
        digest: str,
        clock: "_Clock",
    ) -> UpdateResult:
        directory = self.work / "export"
        export.write_weights(engine.state_dict(), base, directory)
        clock.lap("export")
        if isinstance(request.method, TrainingConfig):
            state = self.work / "state"
            shutil.rmtree(state, ignore_errors=True)
            engine.save(state)
            export.save_checkpoint(self.storage, request.run, request.version, state, _settings(request))
            clock.lap("save")
        result = UpdateResult(
            version=request.version,
            rows=len(batch.rows),
            rows_left_out=dict(batch.left_out),
            metrics=metrics,
            seconds=clock.laps,
        )
        export.publishable(self.storage, request.run, request.iteration, directory, digest, result)
        return result

    def _carry_over(self, request: UpdateRequest, base: Path, batch: Batch, digest: str, clock: "_Clock") -> UpdateResult:
        """No row may teach: the next version is the last one again, optimizer and all, and says why. The run goes on."""
        directory = self.work / "export"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(base, directory, ignore=shutil.ignore_patterns("manifest.json"))
        clock.lap("export")
        result = UpdateResult(version=request.version, rows=0, rows_left_out=dict(batch.left_out), seconds=clock.laps)
        state = export.fetch_checkpoint(self.storage, request.run, request.iteration, _settings(request), self.work)
        if state is not None:
            export.save_checkpoint(self.storage, request.run, request.version, state, _settings(request))
        export.publishable(self.storage, request.run, request.iteration, directory, digest, result)
        if self._warm and (self._warm.run, self._warm.version) == (request.run, request.iteration):
            self._warm.version = request.version
        return result


def _imitate(engine: Engine, batch: Batch, method: SftConfig, seed: int, report: Report) -> dict[str, float]:
    draw = random.Random(f"sft:{seed}")
    steps, collected = _sft_steps(batch, method), list[dict[str, float]]()
    for _ in range(method.epochs):
        order = list(range(len(batch.rows)))
        draw.shuffle(order)
        for start in range(0, len(order), method.batch_size):
            collected.append(engine.sft_step([batch.rows[place] for place in order[start : start + method.batch_size]]))
            report("update", len(collected), steps)
    taken, metrics = _taken(collected)
    last = taken[-max(1, len(taken) // method.epochs) :]
    return metrics | {"loss": _mean(last, "loss"), "loss_first": taken[0]["loss"]}


def _sft_steps(batch: Batch, method: SftConfig) -> int:
    return method.epochs * -(-len(batch.rows) // method.batch_size)


def learning_rate(method: TrainingConfig, iteration: int) -> float:
    """Of one iteration: with `cosine`, half a cosine wave from the whole rate down to FINAL_SHARE of it (arXiv:1608.03983, eq. 5)."""
    if method.schedule == "constant":
        return method.learning_rate
    done = min(1.0, iteration / max(1, method.iterations))
    return method.learning_rate * (FINAL_SHARE + (1 - FINAL_SHARE) * (1 + math.cos(math.pi * done)) / 2)


def _reinforce(
    engine: Engine, batch: Batch, method: TrainingConfig, request: UpdateRequest, report: Report, clock: "_Clock"
) -> dict[str, float]:
    report("logprobs", 0, 0)
    old, entropy = engine.logprobs(batch.rows, request.temperature)
    metrics = _agreement(batch, old, entropy)
    clock.lap("logprobs")
    estimates = algorithms.advantages(batch, method)
    clock.lap("advantages")
    draw = random.Random(f"rl:{request.seed}:{request.iteration}")
    rate = learning_rate(method, request.iteration)
    engine.set_learning_rate(rate)
    steps, collected = method.epochs * -(-len(batch.rows) // method.mini_batch_size), list[dict[str, float]]()
    for _ in range(method.epochs):
        order = list(range(len(batch.rows)))
        draw.shuffle(order)
        for start in range(0, len(order), method.mini_batch_size):
            places = order[start : start + method.mini_batch_size]
            collected.append(
                engine.policy_step(
                    [batch.rows[place] for place in places],
                    old[places],
                    [estimates[place] for place in places],
                    request.temperature,
                    entropy=method.entropy_coeff > 0,
                )
            )
            report("update", len(collected), steps)
    clock.lap("update")
    taken, counts = _taken(collected)
    keys = ("loss", "grad_norm", "actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl")
    metrics |= counts | {"learning_rate": rate}
    return metrics | {key.removeprefix("actor/"): _mean(taken, key) for key in keys if key in taken[0]}


def _taken(collected: list[dict[str, float]]) -> tuple[list[dict[str, float]], dict[str, float]]:
    """The optimizer steps that veRL took, and their count: it leaves out one whose gradient is not finite. BatchError if none was."""
    taken = [metrics for metrics in collected if math.isfinite(metrics["grad_norm"]) and math.isfinite(metrics["loss"])]
    if not taken:
        raise BatchError(f"none of {len(collected)} optimizer steps had a finite gradient")
    return taken, {"steps": float(len(taken)), "steps_skipped": float(len(collected) - len(taken))}


def _mean(collected: list[dict[str, float]], key: str) -> float:
    return sum(metrics[key] for metrics in collected) / len(collected)


def _agreement(batch: Batch, old: torch.Tensor, entropy: torch.Tensor) -> dict[str, float]:
    """How far the trainer's log-probabilities are from those recorded when the tokens were sampled, over sampled tokens."""
    mask = torch.zeros_like(old, dtype=torch.bool)
    recorded = torch.zeros_like(old)
    for place, row in enumerate(batch.rows):
        mask[place, : len(row.mask)] = torch.tensor(row.mask)
        recorded[place, : len(row.logprobs)] = torch.tensor(row.logprobs)
    difference = (old - recorded)[mask].abs()
    return {
        "logprob_diff_max": float(difference.max()),
        "logprob_diff_mean": float(difference.mean()),
        "entropy": float(entropy[mask].mean()),
        "sampled_tokens": float(mask.sum()),
    }


def _settings(request: UpdateRequest) -> str:
    """What an engine was built for: another method, or other settings of it, needs another engine and a fresh optimizer.

    How long the run goes on is not one of them.
    """
    return f"{type(request.method).__name__}:{request.max_context}:{request.method.model_dump_json(exclude={'iterations'})}"


class _Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, phase: str) -> None:
        now = time.monotonic()
        self.laps[phase] = round(self.laps.get(phase, 0.0) + now - self._last, 4)
        self._last = now
