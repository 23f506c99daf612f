"""veRL's TrainingWorker (FSDP2), and rows in the form that it takes.

veRL logs and configures much; only what this project decides is set here. Micro-batches are made by tokens, not by rows, so any number
of rows can be trained on without padding rows, whose place in a mean would have to be argued about.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from contracts.config import SftConfig, TrainingConfig
from trainer.batches import Row


class Engine:
    """A TrainingWorker with its weights and optimizer. Must be used from one thread.

    `method` decides the optimizer's schedule and the loss; `total_steps` is the length of a cosine schedule.
    """

    def __init__(self, weights: Path, method: TrainingConfig | SftConfig, *, max_row: int, total_steps: int = 1) -> None:
        from verl.trainer.config import CheckpointConfig
        from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, PolicyLossConfig
        from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
        from verl.workers.utils.losses import ppo_loss, sft_loss

        rows = method.batch_size if isinstance(method, SftConfig) else method.micro_batch_size
        on_gpu = torch.cuda.is_available()
        dtype = "bf16" if on_gpu else "fp32"
        budget = rows * max_row
        model = HFModelConfig(
            path=str(weights),
            use_remove_padding=False,
            enable_gradient_checkpointing=on_gpu,
            override_config={"attn_implementation": "sdpa"},
        )
        engine = FSDPEngineConfig(
            strategy="fsdp2",
            model_dtype="fp32",
            use_torch_compile=False,
            mixed_precision={"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            use_dynamic_bsz=True,
            max_token_len_per_gpu=budget,
            infer_max_token_len_per_gpu=4 * budget,
        )
        if isinstance(method, SftConfig):
            schedule = {
                "lr_scheduler_type": method.schedule,
                "lr_warmup_steps": method.warmup_steps,
                "total_training_steps": total_steps,
            }
            optimizer = FSDPOptimizerConfig(lr=method.learning_rate, weight_decay=0.0, clip_grad=1.0, **schedule)
        else:
            optimizer = FSDPOptimizerConfig(
                lr=method.learning_rate,
                weight_decay=method.weight_decay,
                clip_grad=method.clip_grad,
                lr_scheduler_type="constant",
                total_training_steps=1,
            )
        self._worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=model,
                engine_config=engine,
                optimizer_config=optimizer,
                checkpoint_config=CheckpointConfig(
                    save_contents=["model", "optimizer", "extra"], load_contents=["model", "optimizer", "extra"]
                ),
            )
        )
        self._worker.reset()
        if isinstance(method, SftConfig):
            actor = FSDPActorConfig(strategy="fsdp2", ppo_mini_batch_size=rows, ppo_micro_batch_size_per_gpu=rows, rollout_n=1)
            self._worker.set_loss_fn(partial(sft_loss, config=actor))
        else:
            actor = FSDPActorConfig(
                strategy="fsdp2",
                ppo_mini_batch_size=method.mini_batch_size,
                ppo_micro_batch_size_per_gpu=method.micro_batch_size,
                rollout_n=1,
                use_dynamic_bsz=True,
                clip_ratio=method.clip_ratio,
                clip_ratio_low=method.clip_ratio,
                clip_ratio_high=method.clip_ratio,
                entropy_coeff=method.entropy_coeff,
                policy_loss=PolicyLossConfig(loss_mode=method.policy_loss),
            )
            self._worker.set_loss_fn(partial(ppo_loss, config=actor))

    def set_learning_rate(self, value: float) -> None:
        """From now on; for an engine whose veRL schedule is constant, as that of reinforcement learning is."""
        engine = self._worker.engine
        engine.lr_scheduler.base_lrs = [value for _ in engine.lr_scheduler.base_lrs]
        for group in engine.optimizer.param_groups:
            group["lr"] = value

    def logprobs(self, rows: Sequence[Row], temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probabilities, entropies) of the response tokens, both [rows, longest response] float32, zero-padded."""
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils.padding import no_padding_2_padding

        data = pack(rows, temperature)
        tu.assign_non_tensor(data, calculate_entropy=True, compute_loss=False)
        output = self._worker.infer_batch(data)
        padded = (no_padding_2_padding(tu.get(output, key), data).float() for key in ("log_probs", "entropy"))
        logprobs, entropy = padded
        return logprobs, entropy

    def policy_step(
        self,
        rows: Sequence[Row],
        old_logprobs: torch.Tensor,
        advantages: Sequence[Sequence[float]],
        temperature: float,
        entropy: bool,
    ) -> dict[str, float]:
        """One optimizer step on one mini-batch; `old_logprobs` is [rows, ≥ longest response]. Returns veRL's metrics."""
        width = max(len(row.response_ids) for row in rows)
        padded = torch.zeros(len(rows), width)
        for place, tokens in enumerate(advantages):
            padded[place, : len(tokens)] = torch.tensor(tokens)
        data = pack(rows, temperature, extra={"old_log_probs": old_logprobs[:, :width].contiguous(), "advantages": padded})
        return self._step(data, len(rows), entropy)

    def sft_step(self, rows: Sequence[Row]) -> dict[str, float]:
        """One optimizer step of supervised fine-tuning on the sampled tokens of `rows`."""
        data = pack(rows, 1.0)
        # veRL's sft_loss takes the mask over prompt and response, jagged, where the packing left the response's.
        masks = [torch.tensor([0] * len(row.prompt_ids) + [int(flag) for flag in row.mask]) for row in rows]
        data["loss_mask"] = torch.nested.as_nested_tensor(masks, layout=torch.jagged)
        return self._step(data, len(rows), entropy=False)

    def _step(self, data: Any, rows: int, entropy: bool) -> dict[str, float]:
        from verl.utils import tensordict_utils as tu

        lengths = data["input_ids"].offsets().diff().tolist()
        tu.assign_non_tensor(
            data,
            calculate_entropy=entropy,
            global_batch_size=rows,
            update_lr_scheduler=True,
            compute_loss=True,
        )
        tu.assign_non_tensor_data(data, "global_token_num", lengths)
        metrics = tu.get(self._worker.train_batch(data), "metrics")
        return {key: value for key, raw in metrics.items() if (value := _number(raw)) is not None}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All weights, whole, on the CPU in float32."""
        parameters = self._worker.engine.get_per_tensor_param()
        pairs = parameters[0] if isinstance(parameters, tuple) else parameters
        return {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in dict(pairs).items()}

    def save(self, directory: Path) -> None:
        """Weights, optimizer and random state, as veRL writes them."""
        self._worker.save_checkpoint(str(directory), global_step=0)

    def load(self, directory: Path) -> None:
        """What `save` wrote."""
        self._worker.load_checkpoint(str(directory))


def pack(rows: Sequence[Row], temperature: float, extra: dict[str, torch.Tensor] | None = None) -> Any:
    """Rows as veRL's jagged TensorDict. `extra` tensors are [rows, longest response]."""
    from verl.protocol import DataProto
    from verl.workers.utils.padding import left_right_2_no_padding

    prompt = max(len(row.prompt_ids) for row in rows)
    response = max(len(row.response_ids) for row in rows)
    ids = torch.zeros(len(rows), prompt + response, dtype=torch.long)
    attention = torch.zeros_like(ids)
    mask = torch.zeros(len(rows), response, dtype=torch.long)
    for place, row in enumerate(rows):
        start, end = prompt - len(row.prompt_ids), prompt + len(row.response_ids)
        ids[place, start:end] = torch.tensor(row.prompt_ids + row.response_ids)
        attention[place, start:end] = 1
        mask[place, : len(row.mask)] = torch.tensor([int(flag) for flag in row.mask])
    tensors = {
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "prompts": ids[:, :prompt],
        "responses": ids[:, prompt:],
        "response_mask": mask,
        **(extra or {}),
    }
    data = DataProto.from_dict(tensors=tensors, meta_info={"temperature": temperature})
    return left_right_2_no_padding(data.to_tensordict())


def _number(value: Any) -> float | None:
    aggregate: Callable[[], Any] | None = getattr(value, "aggregate", None)
    if aggregate is not None:
        value = aggregate()
    if isinstance(value, list):
        numbers = [number for item in value if (number := _number(item)) is not None]
        return sum(numbers) / len(numbers) if numbers else None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
