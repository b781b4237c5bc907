"""One optimizer step on a batch, by Tandem's workers and by verl's functions in verl's interpreter."""

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from tandem.config.load import load_train_config
from tandem.config.root import TrainConfig
from tandem.engines.train.base import Counts
from tandem.observability.metrics import Metrics
from tandem.observability.run import RunFolder
from tandem.protocol import DataProto, Ragged
from tandem.workers.batch import BatchWorker
from tandem.workers.correction import without_rejected
from tandem.workers.losses import ActorLoss, CriticLoss

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".peers" / "verl" / "bin" / "python"
SAMPLES, LONGEST, N, PROMPT = 16, 24, 4, 2
MICRO = tuple(tuple(range(first, first + 4)) for first in range(0, SAMPLES, 4))
WHOLE = (tuple(range(SAMPLES)),)
CORRECTION = {"rollout_is": None, "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": False}
CORRECTION |= {"rollout_rs": None, "rollout_rs_threshold": None, "bypass_mode": False}
CORRECTION |= {"loss_type": "ppo_clip"}
ALGORITHM: dict[str, Any] = {"adv_estimator": "gae", "gamma": 1.0, "lam": 1.0}
ALGORITHM |= {"use_kl_in_reward": False, "kl_penalty": "kl", "norm_adv_by_std_in_grpo": True}
ALGORITHM |= {"kl_ctrl": {"type": "fixed", "kl_coef": 0.001, "horizon": 10000, "target_kl": 0.1}}
ALGORITHM |= {"rollout_correction": CORRECTION}
"""The defaults of verl for the arguments of its functions; those of its actor are in verl's dataclass."""
CRITIC = {"cliprange_value": 0.5, "loss_agg_mode": "token-mean", "loss_scale_factor": None}
ACTOR = (
    "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg", "policy_loss",
    "loss_agg_mode", "loss_scale_factor", "entropy_coeff", "use_kl_loss", "kl_loss_coef", "kl_loss_type",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A step on a batch: verl's words, columns, the rows of each micro-batch, words for Tandem alone."""

    words: tuple[str, ...]
    columns: Mapping[str, Tensor]
    micro: tuple[tuple[int, ...], ...] = MICRO
    ours: tuple[str, ...] = ()


def batch(seed: int, *, holes: float = 0.0, empty: int = 0) -> dict[str, Tensor]:
    """Return 16 samples, 4 per prompt; a tool wrote a share `holes` of inner tokens, `empty` have none."""
    draw = torch.Generator().manual_seed(seed)
    shape = SAMPLES, LONGEST

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=draw, dtype=torch.float64)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(shape, generator=draw, dtype=torch.float64)

    lengths = torch.randint(2, LONGEST + 1, (SAMPLES,), generator=draw)
    lengths[torch.randperm(SAMPLES, generator=draw)[:empty]] = 0
    place = torch.arange(LONGEST)
    last = place == lengths[:, None] - 1
    mask = (place < lengths[:, None]) & ((uniform(*shape) >= holes) | (place == 0) | last)
    log_probs = -3 * uniform(*shape) - 0.05
    old = (log_probs + normal(0.3)).clamp(max=-0.01)
    return {
        "lengths": lengths,
        "group": torch.arange(SAMPLES) // N,
        "response_mask": mask,
        "log_probs": log_probs,
        "old_log_probs": old,
        "rollout_log_probs": (old + normal(0.3)).clamp(max=-0.01),
        "ref_log_prob": (log_probs + normal(0.5)).clamp(max=-0.01),
        "entropy": 2 * uniform(*shape),
        "values": normal(0.5),
        "new_values": normal(0.5),
        "token_level_scores": last * (uniform(SAMPLES, 1) < 0.4).double(),
        "sum_pi_squared": (2 * log_probs).exp() + 0.1 * uniform(*shape),
        "reward_baselines": uniform(SAMPLES // N).repeat_interleave(N),
        "reward_components": uniform(SAMPLES, 2),
    }


def verl_case(case: Case) -> dict[str, Any]:
    words = [word.lstrip("+") for word in case.words]
    given = OmegaConf.to_container(OmegaConf.from_dotlist(words))
    assert isinstance(given, dict)
    actor = given.get("actor_rollout_ref", {}).get("actor", {})
    settings = {name: actor[name] for name in ACTOR if name in actor}
    wanted = {"loss_agg_mode": settings.get("loss_agg_mode", CRITIC["loss_agg_mode"])}
    critic = CRITIC | wanted | {n: v for n, v in given.get("critic", {}).items() if n in CRITIC}
    algorithm = OmegaConf.merge(ALGORITHM, given.get("algorithm", {}))
    estimator = algorithm.adv_estimator
    readers = {"reward_baselines": "remax", "reward_components": "gdpo", "new_values": "gae"}
    columns = {n: v for n, v in case.columns.items() if readers.get(n, estimator) == estimator}
    found = {"columns": columns, "actor": settings, "critic": critic, "applied": True}
    found["micro"] = [list(rows) for rows in case.micro]
    return found | {"algorithm": OmegaConf.to_container(algorithm)}


def by_verl(cases: Sequence[Case]) -> list[dict[str, Any]]:
    assert PYTHON.exists(), "make peers"
    with tempfile.TemporaryDirectory() as folder:
        given, answers = Path(folder) / "given.pt", Path(folder) / "answers.pt"
        torch.save([verl_case(case) for case in cases], given)
        script = ROOT / "benchmarks" / "peers" / "verl_update.py"
        done = subprocess.run(
            [PYTHON, script, given, answers], capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found: list[dict[str, Any]] = torch.load(answers, weights_only=False)
    return found


def configured(case: Case, folder: Path) -> TrainConfig:
    """Return the config that Tandem makes of the case's words, with files of `folder`."""
    model, rows, reward = folder / "model", folder / "rows.parquet", folder / "reward.py"
    if not model.exists():
        model.mkdir(parents=True)
        (model / "config.json").write_text('{"model_type": "qwen2", "max_position_embeddings": 32768}')
        rows.touch()
        reward.write_text("def compute_score(**rest):\n    return 0.0\n")
    own = {"data.train_files": rows, "data.val_files": rows, "actor_rollout_ref.model.path": model}
    own |= {"trainer.n_gpus_per_node": 1, "trainer.logger": "[console]", "trainer.defaults": "verl"}
    others = {"critic.model.path": model, "custom_reward_function.path": reward}
    ends = own | others | {"rollout.name": "native", "parallel_size": 1}
    placed = []
    for word in case.words:
        name, _, value = word.partition("=")
        placed.append(f"{name}={next((there for end, there in ends.items() if name.endswith(end)), value)}")
    needed = [f"{name}={value}" for name, value in own.items()]
    engine = "actor_rollout_ref.rollout.name=native"
    return load_train_config(None, [*placed, *needed, engine, *case.ours]).config


def by_tandem(case: Case, folder: Path) -> dict[str, Tensor]:
    config = configured(case, folder)
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    correction = algorithm.rollout_correction
    worker = BatchWorker(algorithm, RunFolder(folder / "run"), actor)
    table = _table(case.columns, algorithm.gdpo_reward_keys, without_old=correction.bypass_mode)
    coefficient = algorithm.kl_ctrl.kl_coef if algorithm.use_kl_in_reward else 0.0
    table = table.union(worker.compute_advantages(table, coefficient))
    found = {name: _rectangle(table.ragged(name)) for name in ("advantages", "returns")}
    learnt = without_rejected(table)
    loss = ActorLoss.from_config(actor, recomputed=not correction.bypass_mode, correction=correction)
    outputs = {name: case.columns[name].clone() for name in ("log_probs", "entropy")}
    total, gradient = _accumulated(loss, learnt, outputs, "log_probs", case)
    found |= {"loss": total, "gradient": gradient}
    if config.needs_critic:
        values = {"values": case.columns["new_values"].clone()}
        critic = CriticLoss(config.critic.cliprange_value, config.critic.aggregation, actor.loss_scale_factor)
        total, gradient = _accumulated(critic, learnt, values, "values", case)
        found |= {"value_loss": total, "value_gradient": gradient}
    return found


def _accumulated(
    loss: ActorLoss | CriticLoss, table: DataProto, outputs: dict[str, Tensor], by: str, case: Case
) -> tuple[Tensor, Tensor]:
    """Return the mini-batch's loss and gradient, summed over micro-batches like in a training engine."""
    mask = table.ragged("response_mask")
    kept = mask.to_padded().bool()
    counts = Counts(tokens=int(kept.sum()), sequences=int(kept.any(1).sum()))
    leaf = outputs[by].requires_grad_()
    shares, told = [], []
    for rows in case.micro:
        part = table[list(rows)]
        out = {name: _flat(column, case.columns, rows) for name, column in outputs.items()}
        columns = {name: part.ragged(name).values for name in loss.columns}
        share, metrics = loss(out, columns, part.ragged("response_mask").offsets, counts)
        shares.append(share)
        told.append(metrics)
    rejects = isinstance(loss, ActorLoss) and loss.rejects
    factor = loss.recount(Metrics.merged(told), counts) if rejects else 1.0
    total = torch.stack(shares).sum() * factor
    return total.detach(), torch.autograd.grad(total, leaf)[0]


def _flat(column: Tensor, columns: Mapping[str, Tensor], rows: Sequence[int]) -> Tensor:
    """Return the rows of a rectangle end to end, with a prompt of zeros before each row."""
    lengths = columns["lengths"].tolist()
    before = torch.zeros(PROMPT, dtype=column.dtype)
    return torch.cat([torch.cat((before, column[row, : lengths[row]])) for row in rows])


def _table(columns: Mapping[str, Tensor], components: Sequence[str], *, without_old: bool) -> DataProto:
    everyone, lengths = range(SAMPLES), columns["lengths"] + PROMPT
    names = {name: name for name in columns if columns[name].shape == (SAMPLES, LONGEST)}
    names |= {"ref_log_prob": "ref_log_probs"}
    for name in ("log_probs", "entropy", "new_values", *(["old_log_probs"] if without_old else [])):
        del names[name]
    ragged: dict[str, Ragged | Tensor] = {
        ours: Ragged.from_lengths(_flat(columns[name], columns, everyone), lengths)
        for name, ours in names.items()
    }
    ragged["reward_baselines"] = columns["reward_baselines"]
    called = components or ("component 0", "component 1")
    extras = [dict(zip(called, row, strict=True)) for row in columns["reward_components"].tolist()]
    uids = [f"prompt {number}" for number in columns["group"].tolist()]
    return DataProto(ragged, {"uid": uids, "reward_extra": extras})


def _rectangle(column: Ragged) -> Tensor:
    padded = column.to_padded(length=PROMPT + LONGEST)
    return padded[:, PROMPT:]


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).double().norm() / wanted.double().norm())
