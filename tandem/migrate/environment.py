"""Environment variables that verl reads, and what each does for a run here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable that verl, or what it starts, reads.

    Attributes:
        acts: whether it acts here, under its own name.
        sentence: what reads it here; or why nothing does, and which key does the same.
    """

    acts: bool
    sentence: str


def _acts(sentence: str) -> Variable:
    return Variable(True, sentence)


def _nothing(sentence: str) -> Variable:
    return Variable(False, sentence)


_DEVICES = _acts("limits the devices that PyTorch and Ray see")
_LIBRARY = "read by the library that is named in it, here too"
_RANKS = _nothing("each rank is told its place by the controller")
_PROFILER = _nothing("the timeline of every run is in timeline.json")
_OWN_KERNELS = _nothing("a switch of a kernel of verl's own")
_OWN_TRACE = _nothing("a switch of a tracing tool of verl's own; runs keep every sample in samples/")
_ASCEND = _nothing("there are no Ascend devices here")
_DETERMINISM = _nothing("actor_rollout_ref.actor.fsdp_config.full_determinism=true sets it")
_SGLANG = _nothing("SGLang runs as a server of its own here, which reads it where it is started")
_TENSORRT = _nothing("there is no TensorRT-LLM here")

VARIABLES: dict[str, Variable] = {
    **dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), _DEVICES),
    **dict.fromkeys(("ASCEND_VISIBLE_DEVICES", "ASCEND_HOME_PATH", "ASCEND_RT_VISIBLE_DEVICES"), _ASCEND),
    **dict.fromkeys(
        ("VLLM_ASCEND_TASK_QUEUE_ENABLE", "HCCL_DETERMINISTIC", "CLOSE_MATMUL_K_SHIFT", "TASK_QUEUE_ENABLE"),
        _ASCEND,
    ),
    **dict.fromkeys(("HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE"), _ASCEND),
    **dict.fromkeys(
        ("NCCL_DEBUG", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE"), _acts(_LIBRARY + " (NCCL)")
    ),
    **dict.fromkeys(
        (
            "NCCL_CUMEM_ENABLE",
            "NCCL_P2P_DISABLE",
            "NCCL_IB_DISABLE",
            "NCCL_SOCKET_IFNAME",
            "NCCL_MNNVL_ENABLE",
        ),
        _acts(_LIBRARY + " (NCCL)"),
    ),
    **dict.fromkeys(
        ("VLLM_USE_V1", "VLLM_LOGGING_LEVEL", "VLLM_BATCH_INVARIANT"), _acts(_LIBRARY + " (vLLM)")
    ),
    **dict.fromkeys(
        ("VLLM_ATTENTION_BACKEND", "VLLM_DISABLE_COMPILE_CACHE", "VLLM_WORKER_MULTIPROC_METHOD"),
        _acts(_LIBRARY + " (vLLM)"),
    ),
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": _nothing("rollouts get the merged weights of adapters"),
    **dict.fromkeys(
        ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "TORCH_COMPILE_DISABLE", "TORCH_CUDA_ARCH_LIST"),
        _acts(_LIBRARY + " (PyTorch)"),
    ),
    **dict.fromkeys(
        ("TORCH_NCCL_AVOID_RECORD_STREAMS", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"),
        _acts(_LIBRARY + " (PyTorch, CUDA)"),
    ),
    "CUBLAS_WORKSPACE_CONFIG": _acts(_LIBRARY + " (cuBLAS); full_determinism sets it"),
    "OMP_NUM_THREADS": _acts("threads of each process; unset, the cores are shared out among the ranks"),
    "PYTHONHASHSEED": _acts("read by the Pythons that the run starts"),
    "PYTHONFAULTHANDLER": _acts("read by the Pythons that the run starts"),
    "LD_LIBRARY_PATH": _acts("read by the system in processes that the run starts"),
    "TOKENIZERS_PARALLELISM": _acts(_LIBRARY + " (tokenizers)"),
    "RAY_ADDRESS": _nothing("trainer.cluster.address joins a Ray cluster"),
    "RAY_JOB_CONFIG_JSON_ENV_VAR": _nothing("set by `ray job submit`, which is not run"),
    **dict.fromkeys(
        ("WANDB_ENTITY", "WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR"), _acts(_LIBRARY + " (wandb)")
    ),
    **dict.fromkeys(("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"), _acts(_LIBRARY + " (MLflow)")),
    **dict.fromkeys(("SWANLAB_API_KEY", "SWANLAB_LOG_DIR", "SWANLAB_MODE"), _acts(_LIBRARY + " (SwanLab)")),
    **dict.fromkeys(("VOLC_ACCESS_KEY_ID", "VOLC_SECRET_ACCESS_KEY", "MLP_TRACKING_REGION"), _acts(_LIBRARY)),
    "TENSORBOARD_DIR": _nothing("TensorBoard's files are in the run folder, trainer.default_local_dir"),
    **dict.fromkeys(
        ("VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT"),
        _nothing("metrics.jsonl is in the run folder, trainer.default_local_dir"),
    ),
    **dict.fromkeys(
        ("HF_HOME", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_TOKEN"), _acts(_LIBRARY + " (Hugging Face)")
    ),
    "VERL_USE_MODELSCOPE": _nothing("a model is a local folder; nothing is downloaded"),
    **dict.fromkeys(
        ("VERL_LOGGING_LEVEL", "VERL_SFT_LOGGING_LEVEL", "HYDRA_FULL_ERROR", "TF_CPP_MIN_LOG_LEVEL"),
        _nothing("logs and errors are whole here"),
    ),
    **dict.fromkeys(
        ("VERL_FULL_DETERMINISM", "FLASH_ATTENTION_DETERMINISTIC", "NCCL_DETERMINISTIC"), _DETERMINISM
    ),
    "VERL_SEED": _nothing("trainer.seed is the key"),
    **dict.fromkeys(
        ("VERL_USE_EXTERNAL_MODULES", "VERL_USE_EXTERNAL_PLUGINS"),
        _nothing("code of one's own is named by keys, as file.py:function"),
    ),
    **dict.fromkeys(
        ("VERL_PLATFORM", "VERL_FORCE_DEVICE", "VERL_ENGINE_DEVICE", "VERL_ENGINE_VENDOR"),
        _nothing("trainer.device is the key"),
    ),
    "VERL_AUTO_PADDING": _nothing("batches need not be divisible by anything, and nothing is padded"),
    "VERL_DATAPROTO_SERIALIZATION_METHOD": _nothing("batches go from worker to worker by reference"),
    **dict.fromkeys(
        ("VERL_DISABLE_FLASH_ATTN_CE", "VERL_DISABLE_TRITON_FP8", "SGLANG_USE_AITER"), _OWN_KERNELS
    ),
    **dict.fromkeys(
        ("VERL_VLLM_FP8_QUANT_ENABLED", "SGLANG_FP8_IGNORED_LAYERS"), _nothing("there is no fp8 here")
    ),
    "VERL_USE_GPT_OSS": _nothing("a switch for one model's chat format in verl's servers"),
    **dict.fromkeys(
        ("VERL_ENABLE_TRACKER", "VERL_TRACKER_HDFS_DIR", "VERL_TRACKER_VERBOSE", "VERL_ROUTER_REPLAY_DEBUG"),
        _OWN_TRACE,
    ),
    **dict.fromkeys(("VERL_RL_INSIGHT_ENABLE", "VERL_REPLAY_BUFFER_DEBUG_INTERVAL_SECONDS"), _OWN_TRACE),
    **dict.fromkeys(
        (
            "VERL_REPLICA_RANK",
            "VERL_RAY_JOB_ID",
            "VERL_ZMQ_BASE_TRAINER_RANK",
            "DIST_INIT_METHOD",
            "WG_BACKEND",
        ),
        _RANKS,
    ),
    **dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RAY_LOCAL_WORLD_SIZE"), _RANKS),
    **dict.fromkeys(("MASTER_ADDR", "MASTER_PORT", "REDIS_STORE_SERVER_HOST"), _RANKS),
    **dict.fromkeys(
        ("VLLM_TORCH_PROFILER_DIR", "VLLM_TORCH_PROFILER_WITH_STACK", "VLLM_TORCH_PROFILER_RECORD_SHAPES"),
        _acts(_LIBRARY + " (vLLM)"),
    ),
    "VLLM_TORCH_PROFILER_WITH_PROFILE_MEMORY": _acts(_LIBRARY + " (vLLM)"),
    "VERL_KEEP_NVTX_INJECTION": _PROFILER,
    **dict.fromkeys(("SGLANG_USE_CPU_ENGINE", "SGLANG_BLOCK_NONZERO_RANK_CHILDREN"), _SGLANG),
    **dict.fromkeys(
        ("TLLM_USE_TORCHSAMPLER", "TLLM_DISABLE_NVLS_MNNVL", "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL"),
        _TENSORRT,
    ),
    "MC_TCP_ENABLE_CONNECTION_POOL": _nothing("there is no Mooncake here"),
    "USE_FLAGCX": _nothing("there is no FlagCX here"),
    "TRANSFER_QUEUE_ENABLE": _nothing("batches go from worker to worker by reference"),
    **dict.fromkeys(
        (
            "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
            "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
        ),
        _nothing("no run is saved before a rented machine's end by itself; SIGTERM saves and ends it"),
    ),
}
"""By name. A variable that is not here acts on whatever reads it, as it does everywhere."""

_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def rows(variables: Mapping[str, str]) -> Iterable[tuple[str, str, bool, str]]:
    """Name, value, whether it acts here, and the sentence, of each variable; no secret is shown.

    Args:
        variables: values by name.
    """
    for name, value in sorted(variables.items()):
        known = VARIABLES.get(name, Variable(True, "in the environment of the run"))
        shown = "(given)" if any(part in name for part in _SECRET) else value
        yield name, shown, known.acts, known.sentence
