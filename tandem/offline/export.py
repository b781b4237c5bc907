"""From a checkpoint of a run to a Hugging Face model folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from tandem.checkpoint.best import Best
from tandem.checkpoint.hf_export import export
from tandem.checkpoint.manager import Checkpoint, CheckpointManager, open_checkpoint
from tandem.checkpoint.weights import read_weights
from tandem.config.model import ModelConfig
from tandem.config.own_code import require_own
from tandem.config.written import at_key, resolved
from tandem.errors import CheckpointError
from tandem.models.ends import stop_token_ids
from tandem.models.loading import load_config
from tandem.models.vocabulary import tokenizer_of
from tandem.observability import terminal
from tandem.observability.config_file import read_config
from tandem.observability.inside import require_inside
from tandem.offline.export_files import copy_files, declare_ends
from tandem.offline.export_lora import export_adapter, merged_weights
from tandem.offline.generate import alone


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    dtype: torch.dtype = torch.float32,
    best: bool = False,
    adapter: bool = False,
    max_shard_bytes: int = 5_000_000_000,
    say: Callable[[str], None] = terminal.say,
) -> Path:
    """Write what a checkpoint has learnt as a folder that `transformers` loads: a policy as a causal language
    model, a reward model as a classifier with one label, either with its adapters merged. The weights are
    read and written one after the other; the model is never built.

    Args:
        checkpoint: RUN/checkpoints/step_NNNNNN, or RUN for its newest whole checkpoint.
        out: the folder to write; must not exist or be empty.
        dtype: of the written weights.
        best: of RUN, the best checkpoint by its `trainer.keep_best` instead of the newest.
        adapter: write the adapters alone, as a folder that peft loads.
        max_shard_bytes: size of one weights file at most, and about what is held in memory.
        say: prints a sentence to the user.

    Raises:
        CheckpointError: nothing to export there, or a damaged checkpoint.
        ConfigError: another process writes the folder; no run of this user wrote the config, and it has code
            of the model folder run.
    """
    with alone(out, "OUT", say):
        if out.exists() and any(out.iterdir()):
            raise CheckpointError(
                "the folder to write is not empty", field=str(out), remedy="name a new folder"
            )
        run = checkpoint if (checkpoint / "config.yaml").is_file() else checkpoint.parent.parent
        found = _found(run, checkpoint, best=best)
        model = _model_of(run)
        scores, tokenizer = (found.path / "reward_model").is_dir(), tokenizer_of(model)
        saved = found.path / ("reward_model" if scores else "actor")
        if adapter:
            return export_adapter(saved, model, out, dtype, scores=scores)

        def beside(folder: Path) -> None:
            copy_files(model, folder, scores=scores)
            if not scores:
                declare_ends(folder, stop_token_ids(model.path, tokenizer))

        return export(
            merged_weights(saved, model, scores=scores) if model.lora_rank else read_weights(saved),
            _model_config(model, tokenizer, scores=scores),
            beside,
            out,
            dtype,
            max_shard_bytes=max_shard_bytes,
            trust_remote_code=model.trust_remote_code,
            auto_class=AutoModelForSequenceClassification if scores else AutoModelForCausalLM,
        )


def _model_of(run: Path) -> ModelConfig:
    """The model of a run, by its config."""
    tree = read_config(run / "config.yaml")
    at = "actor_rollout_ref.model" if "actor_rollout_ref" in tree else "model"  # by the trainer that wrote it
    model = ModelConfig.model_validate({name: resolved(tree, f"{at}.{name}") for name in at_key(tree, at)})
    require_own(run / "config.yaml", model.model_dump())
    return model


def _model_config(
    model: ModelConfig, tokenizer: PreTrainedTokenizerBase, *, scores: bool
) -> PreTrainedConfig:
    """The config.json of what is written."""
    config = load_config(model.path, trust_remote_code=model.trust_remote_code)
    if scores:
        config.num_labels = 1
        # By it transformers finds the last token of each sequence. One that also ends sequences would miss
        # their scores: then there is none, and only single sequences can be scored, not wrong ones.
        padding = tokenizer.pad_token_id
        config.pad_token_id = None if padding == tokenizer.eos_token_id else padding
    return config


def _found(run: Path, given: Path, *, best: bool) -> Checkpoint:
    require_inside(run / "checkpoints", run)
    manager = CheckpointManager(run / "checkpoints", read_only=True)
    if best:
        found: Checkpoint | None = _best(manager, run, given)
    elif run == given:
        found = manager.latest()
    else:
        found = open_checkpoint(given) if (given / "manifest.json").is_file() else None
    if found is None or not (run / "config.yaml").is_file():
        raise CheckpointError(
            "no checkpoint of a run",
            field=str(given),
            expected="RUN/checkpoints/step_NNNNNN, or RUN, with RUN/config.yaml",
        )
    return found


def _best(manager: CheckpointManager, run: Path, given: Path) -> Checkpoint:
    """The best checkpoint of a run.

    Raises:
        CheckpointError: the run has none, or a single checkpoint was named.
    """
    if run != given:
        raise CheckpointError(
            "one checkpoint was named, and the best one asked for",
            field=str(given),
            expected="the run's folder",
            remedy=f"name {run}, or leave --best out",
        )
    config = read_config(run / "config.yaml")
    metric = resolved(config, "trainer.keep_best")
    mode = resolved(config, "trainer.keep_best_mode")
    found = None if metric is None else manager.best(Best(metric, mode))
    if found is None:
        raise CheckpointError(
            "the run has no best checkpoint",
            field=str(run),
            got=f"trainer.keep_best: {metric}",
            expected="a run that was saved with trainer.keep_best=METRIC at steps that have this metric",
            remedy="export its newest checkpoint, or name one",
        )
    return found
