"""Export a run's checkpoint as a Hugging Face model folder."""

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
from tandem.config.changed_models import with_changed_models
from tandem.config.model import ModelConfig
from tandem.config.own_code import require_own
from tandem.config.written import at_key, resolved
from tandem.errors import CheckpointError
from tandem.models.ends import stop_token_ids
from tandem.models.loading import load_config
from tandem.models.resized import complete_weights
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
    """Write a checkpoint's model as a folder that `transformers` loads.

    A policy becomes a causal language model, a reward model a classifier with one label. Adapters are merged.
    Weights are read and written one after the other. The model is never instantiated.

    Args:
        checkpoint: RUN/checkpoints/step_NNNNNN, or RUN for its newest complete checkpoint.
        out: the folder to write; it must not exist or be empty.
        dtype: the type of the written weights.
        best: if `checkpoint` is RUN, use its best checkpoint by `trainer.keep_best` instead of the newest.
        adapter: write only the adapters, as a folder that peft loads.
        max_shard_bytes: the maximum size of a weights file, which is also the approximate memory use.
        say: prints a sentence to the user.

    Returns:
        The folder.

    Raises:
        CheckpointError: If there is nothing to export, or the checkpoint is damaged.
        ConfigError: If another process writes the folder, or if the config was not written by a run of this
            user and would run code of the model folder.
    """
    with alone(out, "OUT", say):
        if out.exists() and any(out.iterdir()):
            raise CheckpointError("the output folder is not empty", field=str(out), remedy="use a new folder")
        run = checkpoint if (checkpoint / "config.yaml").is_file() else checkpoint.parent.parent
        found = _found(run, checkpoint, best=best)
        model = _model_of(run)
        scores, tokenizer = (found.path / "reward_model").is_dir(), tokenizer_of(model)
        saved = found.path / ("reward_model" if scores else "actor")
        if adapter:
            return export_adapter(saved, model, out, dtype, scores=scores, say=say)

        def beside(folder: Path) -> None:
            copy_files(model, folder, scores=scores)
            if not scores:
                declare_ends(folder, stop_token_ids(model.path, tokenizer))

        weights = merged_weights(saved, model, scores=scores) if model.lora_rank else read_weights(saved)
        return export(
            weights,
            _model_config(model, tokenizer, scores=scores),
            beside,
            out,
            dtype,
            max_shard_bytes=max_shard_bytes,
            trust_remote_code=model.trust_remote_code,
            auto_class=AutoModelForSequenceClassification if scores else AutoModelForCausalLM,
        )


def _model_of(run: Path) -> ModelConfig:
    """Return the model section of a run's config."""
    tree = read_config(run / "config.yaml")
    at = "actor_rollout_ref.model" if "actor_rollout_ref" in tree else "model"  # depends on the trainer
    model = ModelConfig.model_validate({name: resolved(tree, f"{at}.{name}") for name in at_key(tree, at)})
    require_own(run / "config.yaml", model.model_dump())
    model, _ = with_changed_models(model)
    if model.lora_rank:
        complete_weights(model.path, trust_remote_code=model.trust_remote_code)
    return model


def _model_config(
    model: ModelConfig, tokenizer: PreTrainedTokenizerBase, *, scores: bool
) -> PreTrainedConfig:
    """Return the model config to write as config.json."""
    config = load_config(model.path, trust_remote_code=model.trust_remote_code)
    if scores:
        config.num_labels = 1
        # With the padding token, transformers finds the last token of each sequence. If that token also ends
        # sequences, transformers would read scores at wrong places. So it is left out, and transformers then
        # scores only single sequences.
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
            "this is not a checkpoint of a run",
            field=str(given),
            expected="RUN/checkpoints/step_NNNNNN, or RUN with a checkpoint and a config.yaml",
            remedy="run `tandem runs FOLDER` to list the runs under a folder",
        )
    return found


def _best(manager: CheckpointManager, run: Path, given: Path) -> Checkpoint:
    """Return the best checkpoint of a run.

    Raises:
        CheckpointError: If the run has no best checkpoint, or `given` is a single checkpoint.
    """
    if run != given:
        raise CheckpointError(
            "--best needs a run, but this is a single checkpoint",
            field=str(given),
            expected="the run's folder",
            remedy=f"use {run}, or leave out --best",
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
            remedy="export its newest checkpoint, or name a checkpoint",
        )
    return found
