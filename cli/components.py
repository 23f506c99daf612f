"""The processes of the local stack: what is started, with which environment, and how one sees that it is healthy."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import s3fs

import infra
from cli.problems import UserError
from cli.recipes import Recipe, interpreter
from cli.state import StackState
from infra.settings import Settings
from infra.temporal import connect, ensure_search_attributes

Probe = Callable[[], Awaitable[bool]]
ENGINE_EXTENSION = Path(infra.__file__).parent / "engine"


@dataclass(frozen=True)
class Process:
    """A process to start. `probe` says whether it is healthy; `after` names those that must be healthy first."""

    name: str
    argv: list[str]
    probe: Probe
    url: str = ""
    env: dict[str, str] = field(default_factory=dict)
    after: tuple[str, ...] = ()


def environment(home: Path, state: StackState, recipe: Recipe, *, s3: bool) -> dict[str, str]:
    """The settings of every process of ours. It holds secrets: it goes into child environments and HOME/stack.json only."""
    values = {
        "OPENFORGE_HOME": str(home),
        "OPENFORGE_TEMPORAL_ADDRESS": f"127.0.0.1:{state.port('temporal')}",
        "OPENFORGE_PROXY_URL": f"http://127.0.0.1:{state.port('proxy')}",
        "OPENFORGE_PROXY_SOCKET": str(socket_path(home)),
        "OPENFORGE_PROXY_ADMIN_TOKEN": state.secret("proxy_admin"),
        "OPENFORGE_TRAINER_URL": f"http://127.0.0.1:{state.port('trainer')}",
        "OPENFORGE_TRAINER_TOKEN": state.secret("trainer"),
    }
    engines = {"policy": state.port("vllm"), **{name: state.port(f"engine_{name}") for name in recipe.stack.engines}}
    values["OPENFORGE_ENGINES"] = ",".join(f"{name}=http://127.0.0.1:{port}" for name, port in engines.items())
    if not has_gpu():
        values["OPENFORGE_ENGINE_RELOAD"] = "reload_policy_weights"
    if s3:
        values |= {
            "OPENFORGE_STORAGE_URL": "s3://openforge",
            "OPENFORGE_S3_ENDPOINT": f"http://127.0.0.1:{state.port('s3')}",
            "AWS_ACCESS_KEY_ID": state.secret("s3_access_key"),
            "AWS_SECRET_ACCESS_KEY": state.secret("s3_secret_key"),
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    return values


def socket_path(home: Path) -> Path:
    """The proxy's unix socket, in a directory of its own. The kernel allows 107 bytes."""
    path = home / "run" / "proxy.sock"
    if len(str(path).encode()) > 100:
        raise UserError(f"{home}: this directory's path is too long for a unix socket (100 bytes); choose another with --home")
    return path


def processes(home: Path, state: StackState, recipe: Recipe) -> list[Process]:
    """Every process of the stack, the slow ones first."""
    env = state.environment
    model = recipe.config.policy.model
    settings = Settings.model_validate({"temporal_address": env["OPENFORGE_TEMPORAL_ADDRESS"]})
    found = [_vllm(state, recipe), _trainer(home, state, env), _temporal(home, state, settings)]
    if state.s3:
        found.append(_seaweed(home, state, env))
    for name, engine in recipe.stack.engines.items():
        port = state.ports[f"engine_{name}"]
        argv = [argument.replace("{port}", str(port)) for argument in engine.command]
        found.append(Process(name, argv, _http(port, "/health"), f"http://127.0.0.1:{port}", {"HF_HUB_OFFLINE": "1"}))
    found.append(_proxy(home, state, env, Path(model), recipe.config.policy.max_context))
    worker = [str(interpreter("base")), "-m", "cli.worker"]
    found.append(Process("worker", worker, _polls(settings), "", env, after=("temporal",)))
    return found


def _vllm(state: StackState, recipe: Recipe) -> Process:
    port, options = state.ports["vllm"], recipe.stack.vllm
    argv = [str(interpreter("inference")), "-m", "vllm.entrypoints.openai.api_server", "--model", recipe.config.policy.model]
    argv += ["--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port), "--dtype", options.dtype]
    argv += ["--max-model-len", str(recipe.config.policy.max_context), "--max-num-seqs", str(options.max_num_seqs)]
    argv += ["--enable-scale-out", "--disable-uvicorn-access-log"]
    argv += ["--logprobs-mode", "processed_logprobs"]  # of the distribution that was sampled from, whatever the temperature
    env = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause the engine and load weights
    }
    if not has_gpu():
        argv += ["--enforce-eager", "--num-gpu-blocks-override", "512", "--worker-extension-cls", "vllm_cpu_reload.CpuReload"]
        argv += ["--distributed-executor-backend", "uni"]  # a worker process of its own spins on its queue and takes half the machine
        env |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # or the choice above is overruled, lest OMP be set up badly; here it is set up
            "PYTHONPATH": str(ENGINE_EXTENSION),
            "TORCH_COMPILE_DISABLE": "1",  # compiling makes the first request wait half a minute
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(options.kv_cache_gib),
        }
    return Process("vllm", [*argv, *options.arguments], _http(port, "/health"), f"http://127.0.0.1:{port}", env)


def _trainer(home: Path, state: StackState, env: dict[str, str]) -> Process:
    port = state.ports["trainer"]
    argv = [str(interpreter("trainer")), "-m", "trainer", "--port", str(port), "--work-dir", str(home / "trainer")]
    extra = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return Process("trainer", argv, _http(port, "/healthz"), f"http://127.0.0.1:{port}", {**env, **extra}, after=_storage(state))


def _temporal(home: Path, state: StackState, settings: Settings) -> Process:
    port, ui = state.port("temporal"), state.port("temporal_ui")
    argv = [_binary("temporal"), "server", "start-dev", "--db-filename", str(home / "temporal.db"), "--log-level", "warn"]
    argv += ["--port", str(port), "--ui-port", str(ui), "--ip", "127.0.0.1"]
    # Half the server's CPU a rollout. Nothing is lost when it is killed; when the machine loses power, the last moments are, as a whole.
    argv += ["--sqlite-pragma", "journal_mode=wal", "--sqlite-pragma", "synchronous=normal"]

    async def probe() -> bool:
        client = await connect(settings)
        await ensure_search_attributes(client)
        return True

    return Process("temporal", argv, probe, f"http://127.0.0.1:{ui}", {"GOGC": "400"})


def _seaweed(home: Path, state: StackState, env: dict[str, str]) -> Process:
    """A real S3 server. Its keys are in a file of mode 0600, as SeaweedFS takes them."""
    directory = home / "seaweedfs"
    directory.mkdir(parents=True, exist_ok=True)
    keys = {"accessKey": env["AWS_ACCESS_KEY_ID"], "secretKey": env["AWS_SECRET_ACCESS_KEY"]}
    config = directory / "s3.json"
    config.touch(mode=0o600)
    config.write_text(json.dumps({"identities": [{"name": "openforge", "credentials": [keys], "actions": ["Admin"]}]}))
    argv = [_binary("weed"), "server", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3", f"-s3.config={config}"]
    argv += [f"-s3.port={state.ports['s3']}", "-volume.max=16", "-master.volumeSizeLimitMB=256", "-s3.iam=false"]
    for part in ("master", "volume", "filer"):
        argv += [f"-{part}.port={state.port(f's3_{part}')}", f"-{part}.port.grpc={state.port(f's3_{part}_grpc')}"]
    argv.append(f"-s3.port.grpc={state.port('s3_grpc')}")

    async def probe() -> bool:
        return await asyncio.to_thread(_make_bucket, env)

    return Process("seaweedfs", argv, probe, env["OPENFORGE_S3_ENDPOINT"])


def _make_bucket(env: dict[str, str]) -> bool:
    files = s3fs.S3FileSystem(
        key=env["AWS_ACCESS_KEY_ID"],
        secret=env["AWS_SECRET_ACCESS_KEY"],
        client_kwargs={"endpoint_url": env["OPENFORGE_S3_ENDPOINT"]},
        skip_instance_cache=True,
    )
    if not files.exists("openforge"):
        files.mkdir("openforge")
    return True


def _binary(name: str) -> str:
    """A program that a package of the base environment brought."""
    return str(Path(sys.prefix) / "bin" / name)


def _proxy(home: Path, state: StackState, env: dict[str, str], tokenizer: Path, max_context: int) -> Process:
    port = state.ports["proxy"]
    argv = [str(interpreter("base")), "-m", "proxy", "--tokenizer", str(tokenizer), "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--socket", str(socket_path(home)), "--journal", str(home / "journal.db"), "--max-context", str(max_context)]
    return Process("proxy", argv, _http(port, "/readyz"), f"http://127.0.0.1:{port}", {**env, "HF_HUB_OFFLINE": "1"})


def _storage(state: StackState) -> tuple[str, ...]:
    return ("seaweedfs",) if state.s3 else ()


def _http(port: int, path: str) -> Probe:
    async def probe() -> bool:
        async with httpx.AsyncClient(timeout=5) as client:
            return (await client.get(f"http://127.0.0.1:{port}{path}")).status_code == 200

    return probe


def _polls(settings: Settings) -> Probe:
    """Whether a worker polls all queues."""
    from temporalio.api.enums.v1 import TaskQueueType
    from temporalio.api.taskqueue.v1 import TaskQueue
    from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest

    from contracts.runs import QUEUE, SANDBOX_QUEUE, TRAINER_QUEUE

    async def probe() -> bool:
        client = await connect(settings)
        for queue in (QUEUE, SANDBOX_QUEUE, TRAINER_QUEUE):
            request = DescribeTaskQueueRequest(
                namespace=client.namespace, task_queue=TaskQueue(name=queue), task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY
            )
            if not (await client.workflow_service.describe_task_queue(request)).pollers:
                return False
        return True

    return probe


def has_gpu() -> bool:
    """Whether an NVIDIA driver answers."""
    try:
        return subprocess.run(["nvidia-smi"], capture_output=True, check=False, timeout=20).returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False
