"""A worker extension for vLLM on the CPU: `--worker-extension-cls vllm_cpu_reload.CpuReload`, with this directory on PYTHONPATH.

vLLM's CPU build packs the weights of each linear layer when they are loaded. `reload_weights` packs them anew, except those of an output
head that is tied to the embedding, which goes on with the old ones (vLLM 0.32): log-probabilities are off by as much as the embedding
has moved, and nothing says so. Here the head is packed again. It runs in the inference environment and imports nothing of ours.
"""

from typing import Any


class CpuReload:
    """Mixed into vLLM's worker; called by `collective_rpc`."""

    def reload_policy_weights(self, weights_path: str) -> None:
        """`reload_weights`, then pack a tied output head again."""
        worker: Any = self
        worker.reload_weights(weights_path=weights_path)
        model = worker.get_model()
        head: Any = getattr(model, "lm_head", None)
        if getattr(head, "cpu_linear", None) is not None:
            head.quant_method.process_weights_after_loading(head)
