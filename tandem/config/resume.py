"""What may differ between a run and its continuation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from tandem.config.hydra import read_file
from tandem.config.schema import keys, shown
from tandem.config.section import Section
from tandem.config.tables import published_aggregation
from tandem.config.verl.table import former_names
from tandem.config.written import LEFT_OUT, at_key, refers, resolved, to_dict, without_secrets
from tandem.errors import ConfigError

_FREE = (
    "trainer.*",
    "data.val_*",
    "data.image_key",
    "data.video_key",
    "data.audio_key",
    "data.filter_overlong_prompts_workers",
    "data.cache_dir",
    "*micro_batch_size*",
    "*use_dynamic_bsz",
    "*max_token_len_per_gpu",
    "*ulysses_sequence_parallel_size",
    "*fsdp_config.*",
    "*.strategy",
    "*.trust_remote_code",
    "*.enable_gradient_checkpointing",
    "*.gradient_checkpointing_*",
    "*activation_offload*",
    "*.use_remove_padding",
    "*.attn_implementation",
    "*.use_liger",
    "*.use_fused_kernels",
    "*.fused_kernel_options.*",
    "*optim.fused",
    "*optim.skip_non_finite_steps",
    "*.overlong_buffer.log",
    *(
        f"*.rollout.{name}"
        for name in (
            *("name", "mode", "runner", "server.*", "val_kwargs.*", "max_num_*", "enable_*", "block_size"),
            *("gpu_memory_utilization", "enforce_eager", "num_gpu_blocks_override", "disable_log_stats"),
            *("tensor_model_parallel_size", "free_cache_engine", "update_weights_bucket_megabytes"),
            "log_prob_diff_limit",
        )
    ),
)
"""Keys that decide where and how fast a run goes, how long, and what of it is measured and kept."""

_LEARNT = (
    *("trainer.seed", "trainer.critic_warmup", "trainer.worker_classes"),
    *("*fsdp_config.model_dtype", "*fsdp_config.dtype"),
)
"""Exceptions to these."""

_SILENT = ("trainer.resume_*", "trainer.default_local_dir")
"""Keys that say which run goes on, and nothing of it."""

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Change:
    """A key whose value is not that of the run that goes on.

    Attributes:
        key: its name.
        then, now: its values, as YAML spells them.
    """

    key: str
    then: str
    now: str


@cache
def is_free(name: str) -> bool:
    """Whether a run may go on under another value of this key without learning something else."""
    return _matches(name, _FREE) and not _matches(name, _LEARNT)


def check_same(checkpoint: Path, config: Section, *, allowed: bool, say: Callable[[str], None]) -> None:
    """Tells the user which keys have other values than in the run that a checkpoint is of.

    Args:
        checkpoint: its folder, in that of the run.
        config: the config of the run that goes on.
        allowed: whether something else may be learnt from here on.

    Raises:
        ConfigError: something else would be learnt, and nobody allowed it; or the run's config is no YAML.
    """
    file = checkpoint.parent.parent / "config.yaml"
    if not file.is_file():
        return
    then = read_file(str(file))
    changed = changes({str(name): value for name, value in then.items()}, config)
    if unseen := [
        name for name in config.from_environment if refers(at_key(then, name)) and not is_free(name)
    ]:
        say(
            f"Of these keys the run folder has no values, so that a change would not be seen: "
            f"{', '.join(unseen)}. They come from the environment."
        )
    free = [f"{change.key} ({change.then}, now {change.now})" for change in changed if is_free(change.key)]
    if free:
        say(f"Changed since {checkpoint}, in where, how fast or how long it runs: {', '.join(free)}.")
    learnt = [change for change in changed if not is_free(change.key)]
    if learnt and not allowed:
        raise ConfigError(
            f"the run there has learnt under other settings\n{side_by_side(learnt)}",
            field="trainer.default_local_dir",
            got=file.parent,
            remedy="choose another trainer.default_local_dir; or trainer.resume_mode=disable, which sets "
            "that run aside; or go on from its checkpoint all the same: trainer.resume_with_changes=true",
        )
    if learnt:
        say(f"Changed since {checkpoint}, with effect on what is learnt:\n{side_by_side(learnt)}")


def changes(then: Mapping[str, Any], config: Section) -> list[Change]:
    """The keys that have other values than they had.

    Args:
        then: the tree of the resolved config that a run began with, perhaps under the names of an older
            version. A key that it lacks did not exist yet, and counts as unchanged.
        config: the config of the run that goes on.
    """
    now, values = to_dict(config), config.model_dump(mode="json")
    found: dict[str, tuple[Any, Any]] = {}
    for name in keys(type(config)):
        old, new, value = (
            _named(tree, name, value)
            for tree, value in (
                (then, _old_value(then, name)),
                (now, _at(now, name)),
                (values, _at(values, name)),
            )
        )
        if old is _ABSENT or _matches(name, _SILENT) or _same(old, new) or _same(_value(then, old), value):
            continue
        found[name] = old, new
    sources = {name: key.inherits for name, key in keys(type(config)).items() if key.inherits is not None}
    return [
        Change(name, shown(without_secrets(old, name)), shown(new))
        for name, (old, new) in found.items()
        if found.get(sources.get(name, "")) != (old, new)  # else the source says it
    ]


def _same(old: Any, new: Any) -> bool:
    """Whether two values are equal, as far as they were written."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return old.keys() == new.keys() and all(_same(value, new[name]) for name, value in old.items())
    return old == LEFT_OUT or bool(old == new)


def _value(tree: Mapping[str, Any], written: Any) -> Any:
    """A value of a written config with its references filled in, as far as that can be done here."""
    if not refers(written):
        return written
    try:
        return resolved({**tree, "written": written}, "written")
    except ConfigError:
        return written


def side_by_side(changed: list[Change]) -> str:
    """A table of the keys, what they were and what they are, one line each."""
    rows = [("key", "then", "now"), *((change.key, change.then, change.now) for change in changed)]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"  {key:<{first}}  {then:<{second}}  {now}" for key, then, now in rows)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _old_value(tree: Mapping[str, Any], name: str) -> Any:
    value = _at(tree, name)
    for old in former_names(name) if value is _ABSENT else ():
        if value is _ABSENT:
            value = _at(tree, old)
    return value


def _named(tree: Mapping[str, Any], name: str, value: Any) -> Any:
    """The value; of an aggregation that is left to the loss, that of the loss."""
    at, _, leaf = name.rpartition(".")
    if value is not None or leaf != "loss_agg_mode":
        return value
    loss = _at(tree, f"{at}.policy_loss.loss_mode")
    return published_aggregation(loss if isinstance(loss, str) else "")


def _at(tree: Any, name: str) -> Any:
    for part in name.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return _ABSENT
        tree = tree[part]
    return tree
