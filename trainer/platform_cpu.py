"""veRL's platform plug-in for a machine without an accelerator. `activate` must run before anything of `verl` is imported.

veRL falls back to CUDA where it finds no accelerator; its public plug-in point (`verl.plugin.platform`) takes this one instead. On a
machine with CUDA it does nothing.
"""

import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed


def activate() -> None:
    """Make veRL run on the CPU with gloo, unless there is a CUDA device; a single process that is its own group."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    if torch.cuda.is_available():
        return
    os.environ |= {
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": __name__,
        "VERL_ENGINE_DEVICE": "cuda",  # the name under which the FSDP engine is registered
    }
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # small matrices: a second thread waits more than it works
    _register()
    if not torch.distributed.is_initialized():  # veRL itself would ask for gloo twice
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def _device_module() -> types.ModuleType:
    """`torch.cpu` with the allocator and random-state calls that veRL makes on `torch.cuda`."""
    module = types.ModuleType("cpu_device")
    module.__dict__.update({name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("_")})
    for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
        setattr(module, name, lambda *_, **__: 0)
    for name in ("empty_cache", "reset_peak_memory_stats", "ipc_collect", "set_device", "manual_seed", "manual_seed_all"):
        setattr(module, name, lambda *_, **__: None)
    values: dict[str, Any] = {
        "mem_get_info": lambda *_, **__: (0, 0),
        "get_device_name": lambda *_, **__: "CPU",
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "current_device": lambda: "cpu",
        "is_available": lambda: True,
        "device_count": lambda: 1,
    }
    module.__dict__.update(values)
    return module


def _register() -> None:
    from verl.plugin.platform import PlatformBase, PlatformRegistry

    if getattr(_register, "done", False):
        return

    class PlatformCPU(PlatformBase):  # type: ignore[misc]
        """What veRL asks of a platform, for the CPU."""

        device_name = "cpu"
        vendor_name = "cpu"
        device_module = _device_module()

        def is_available(self) -> bool:
            return True

        def is_platform_available(self, use_smi_check: bool = False) -> bool:
            return True

        def current_device(self) -> str:
            return "cpu"

        def device_count(self) -> int:
            return 1

        def set_device(self, device_index: int) -> None: ...

        def synchronize(self, device_index: int | None = None) -> None: ...

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        def manual_seed_all(self, seed: int) -> None:
            torch.manual_seed(seed)

        def set_allocator_settings(self, settings: str) -> None: ...

        def empty_cache(self) -> None: ...

        def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
            return (None, None)

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "CUDA_VISIBLE_DEVICES"

        @contextmanager
        def nvtx_range(self, msg: str) -> Iterator[None]:
            yield

        def profiler_start(self) -> None: ...

        def profiler_stop(self) -> None: ...

        def ray_resource_name(self) -> str:
            return "CPU"

        def ray_noset_envvars(self) -> list[str]:
            return []

        def ray_resource_options(self, num_gpus: int) -> dict[str, int]:
            return {"num_cpus": num_gpus}

        def is_ipc_supported(self) -> bool:
            return False

        def cudart(self) -> None:
            return None

    PlatformRegistry.register(platform="cpu")(PlatformCPU)
    _register.done = True  # type: ignore[attr-defined]
