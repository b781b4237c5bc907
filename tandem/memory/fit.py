"""The search for the fastest config of a run that fits its devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from tandem.config.root import TrainConfig
from tandem.memory.levers import with_values
from tandem.memory.plan import Phase, Plan
from tandem.memory.shapes import ModelShape
from tandem.memory.timing import Judge

TRAINING = (
    *("tensor", "sequence", "stages", "shards", "recompute", "param_offload", "optimizer_offload"),
    "gradient_sync",
)
ROLLOUT = ("rollout_tensor", "cache_share")
BUDGETS = ("budget", "log_budget")
LEVERS = (*TRAINING, *ROLLOUT, *BUDGETS)
_POLICY = "actor_rollout_ref"
_MODES: dict[str, dict[str, Any]] = {
    "none": {"enable_gradient_checkpointing": False, "enable_activation_offload": False},
    **{
        mode: {
            "enable_gradient_checkpointing": True,
            "gradient_checkpointing_mode": mode.partition(",")[0],
            "enable_activation_offload": "," in mode,
        }
        for mode in ("ops", "full", "full,offload")
    },
}
Space = Mapping[str, Sequence[Any]]
"""A dict from each lever in `LEVERS` to the values to try. If values are equally fast, the first wins."""
Choice = tuple[int, ...]
"""For each lever in `LEVERS`, the index of its chosen value."""
MARGIN = 0.05
"""The fraction of the device's memory that must be free at the moment of peak use."""
_UPDATES = ("actor update", "critic update")
_FORWARDS = ("old log-probs", "ref log-probs", "values")
_ROLLOUTS = ("reshard", "rollout")
_BY_LEVERS = (*_UPDATES, *_FORWARDS, *_ROLLOUTS)


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search.

    Attributes:
        changes: a dict from the config keys to change to their new values.
        seconds: the predicted seconds of a step. None: no config fits, and `changes` is the config that
            exceeds the memory least.
        lacking: the bytes by which the config exceeds the device's memory minus the margin; 0 if it fits.
    """

    changes: dict[str, Any]
    seconds: float | None
    lacking: float = 0.0


def search(config: TrainConfig, judge: Judge, space: Space | None = None) -> Found:
    """Search for the fastest config that fits with `MARGIN`; of equal ones, the first in the space.

    The search tries the choices of all levers except the token budgets. The choices are ordered by a lower
    bound: the minimum time with any budgets. The search stops when no remaining choice can be faster than the
    best one found. The times of training and of the rollout are added, so each is computed separately.

    Memory is not monotonic in the token budget of updates, because a single micro-batch needs no whole
    gradient. Therefore every budget is tried. The budgets of forward-only passes affect other phases, so they
    are tried in the same plans.

    Args:
        config: the config to start from.
        judge: the object that computes the memory plan and the seconds of a config.
        space: the values to try; None: the result of `default_space`.

    Raises:
        ConfigError: the device is a CPU that was not measured, so the seconds cannot be predicted.
    """
    shape = judge.shapes(config.actor_rollout_ref.model.path)
    return _Search(config, shape, space or default_space(config, shape), judge).found()


@dataclass
class _Search:
    config: TrainConfig
    shape: ModelShape
    space: Space
    judge: Judge
    nearest: tuple[float, Choice] = (float("inf"), ())
    seen: dict[Choice, tuple[list[int], list[int]]] = field(default_factory=dict)

    def found(self) -> Found:
        best: tuple[float, Choice] | None = None
        for bound, outer in sorted(self._bounds()):
            if (
                best is not None and bound > best[0] + 1e-5
            ):  # tolerance, because the seconds are rounded before they are added
                break
            each = self._best(outer)
            if each is not None and (best is None or each < best) and self.judge.accepts(self._keys(each[1])):
                best = each
        if best is None:
            return self._nearest()
        return Found(self._keys(best[1]), best[0])

    def _keys(self, choice: Choice) -> dict[str, Any]:
        return changes(self.config, self.space, choice)

    def _seconds(self, choice: Choice, slots: int | None = None) -> float:
        config = with_values(self.config, self._keys(choice))
        return round(self.judge.seconds(config, slots), 6)

    def _places(self, names: Sequence[str]) -> list[Choice]:
        return list(product(*(range(len(self.space[name])) for name in names)))

    def _bounds(self) -> Iterator[tuple[float, Choice]]:
        """Yield each choice of all levers except the budgets, with a lower bound of its seconds."""
        most, longest = (len(self.space[name]) - 1 for name in BUDGETS)
        rollouts, first = self._places(ROLLOUT), (0,) * len(ROLLOUT)
        beside: dict[Choice, float] = {}
        for training in self._places(TRAINING):
            tried = (
                [most] if self.space["stages"][training[2]] == 1 else range(most + 1)
            )  # in a pipeline, later stages wait for the first micro-batch
            whole = [(*training, *first, budget, longest) for budget in tried]
            whole = [each for each in whole if possible(self.config, self.shape, self.space, each)]
            if not whole:
                continue
            least = min(self._seconds(each) for each in whole)
            if not beside:
                at = (*whole[0][-2:],)
                base = self._seconds((*training, *first, *at))
                beside = {each: self._seconds((*training, *each, *at)) - base for each in rollouts}
            yield from ((least + beside[each], (*training, *each)) for each in rollouts)

    def _best(self, outer: Choice) -> tuple[float, Choice] | None:
        """Return the fastest choice of budgets with its seconds, or None if no budgets fit."""
        free = (
            self.config.actor_rollout_ref.rollout.free_cache_engine
        )  # otherwise the rollout engine stays in memory during updates
        key = (*outer[: len(TRAINING)], *((0,) * len(ROLLOUT) if free else outer[len(TRAINING) :]))
        if key not in self.seen:
            self.seen[key] = self._fitting(key)
        updates, forwards = self.seen[key]
        if not updates or not forwards:
            return None
        plan = self._plan((*outer, updates[-1], forwards[-1]))
        if self._lacking(plan.phases, plan) > 0:
            self._near(plan.phases, plan, (*outer, updates[-1], forwards[-1]))
            return None
        _, update = min((self._seconds((*outer, each, forwards[-1]), plan.slots), each) for each in updates)
        seconds, forward = min((self._seconds((*outer, update, each), plan.slots), each) for each in forwards)
        return seconds, (*outer, update, forward)

    def _fitting(self, outer: Choice) -> tuple[list[int], list[int]]:
        """Return the token budgets that fit, for updates and for forward-only passes."""
        lengths = [len(self.space[name]) for name in BUDGETS]
        updates, forwards = set(), set()
        for place in range(max(lengths)):
            choice = (*outer, *(min(place, length - 1) for length in lengths))
            if not possible(self.config, self.shape, self.space, choice):
                continue
            plan = self._plan(choice)
            fits = {phase.name: self._lacking([phase], plan) <= 0 for phase in plan.phases}
            others = [phase for phase in plan.phases if phase.name not in _ROLLOUTS]
            if self._lacking(others, plan) > 0:
                self._near(others, plan, choice)
            if not all(fit for name, fit in fits.items() if name not in _BY_LEVERS):
                break  # budgets do not change the memory of these phases
            if all(fits[name] for name in _UPDATES if name in fits):
                updates.add(choice[-2])
            if all(fits[name] for name in _FORWARDS if name in fits):
                forwards.add(choice[-1])
        return sorted(updates), sorted(forwards)

    def _plan(self, choice: Choice) -> Plan:
        return self.judge.plan(with_values(self.config, self._keys(choice)))

    def _lacking(self, phases: Sequence[Phase], plan: Plan) -> float:
        return max(phase.needed for phase in phases) - plan.device * (1 - MARGIN)

    def _near(self, phases: Sequence[Phase], plan: Plan, choice: Choice) -> None:
        self.nearest = min(self.nearest, (self._lacking(phases, plan), choice))

    def _nearest(self) -> Found:
        """Return the choice that exceeds the memory least.

        Its rollout values are the values that need the least memory.
        """
        _, choice = self.nearest
        if not choice:
            return Found({}, None, float("inf"))
        tried = [
            (*choice[: len(TRAINING)], *each, *choice[-len(BUDGETS) :]) for each in self._places(ROLLOUT)
        ]
        lacking, least = min((self._lacking((plan := self._plan(each)).phases, plan), each) for each in tried)
        return Found(self._keys(least), None, lacking)


def default_space(config: TrainConfig, shape: ModelShape, per_node: int = 8) -> dict[str, Sequence[Any]]:
    """Return a dict from each lever to the values that `tandem plan --fit` tries.

    Parallel sizes divide the numbers of devices and heads, and are at most the devices of a node.
    """
    devices, d = config.trainer.devices_of("actor"), shape.decoder
    sizes = [size for size in (1, 2, 4, 8) if devices % size == 0 and size <= per_node]
    split = [size for size in sizes if not any(n % size for n in (d.heads, d.key_heads, d.intermediate))]
    rollout = config.trainer.devices_of("rollout")
    longest = config.actor_rollout_ref.rollout.longest(config.data)
    least = (-(-longest // max(sizes)) - 1).bit_length()
    batch = config.actor_rollout_ref.actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n * longest
    most = max(least, min(19, (batch * max(sizes) // devices - 1).bit_length()))
    budgets = [2**power for power in range(least, most + 1)]
    return {
        "tensor": split,
        "sequence": [size for size in sizes if d.heads % size == 0],
        "stages": [1, 2, 4] if devices > per_node and devices % 4 == 0 else [1],
        "shards": [-1, per_node] if devices > per_node else [-1],
        "recompute": list(_MODES),
        "param_offload": [False, True],
        "optimizer_offload": [False, True],
        "gradient_sync": ["once", "each"] if devices > 1 else ["auto"],
        "rollout_tensor": [size for size in split if rollout % size == 0],
        "cache_share": [0.9, 0.8, 0.6, 0.4],
        "budget": budgets,
        "log_budget": budgets,
    }


def changes(config: TrainConfig, space: Space, choice: Choice) -> dict[str, Any]:
    """Return a dict from config key to value, with all the keys that a choice sets."""
    at = _values(space, choice)
    sections = [f"{_POLICY}.actor", *(["critic"] if config.needs_critic else [])]
    found: dict[str, Any] = {}
    for section in [*sections, *([f"{_POLICY}.ref"] if config.needs_reference else [])]:
        found[f"{section}.fsdp_config.tensor_parallel_size"] = at["tensor"]
        found[f"{section}.fsdp_config.pipeline_parallel_size"] = at["stages"]
        found[f"{section}.fsdp_config.fsdp_size"] = at["shards"]
        found[f"{section}.ulysses_sequence_parallel_size"] = at["sequence"]
        found[f"{section}.fsdp_config.param_offload"] = at["param_offload"]
        if section in sections:
            found[f"{section}.fsdp_config.optimizer_offload"] = at["optimizer_offload"]
            found[f"{section}.fsdp_config.gradient_sync"] = at["gradient_sync"]
            found[f"{section}.use_dynamic_bsz"] = True
            found[f"{section}.ppo_max_token_len_per_gpu"] = at["budget"]
            model = f"{_POLICY}.model" if section.endswith("actor") else "critic.model"
            found |= {f"{model}.{key}": value for key, value in _MODES[at["recompute"]].items()}
    for section in (f"{_POLICY}.rollout", *([f"{_POLICY}.ref"] if config.needs_reference else [])):
        found[f"{section}.log_prob_use_dynamic_bsz"] = True
        found[f"{section}.log_prob_max_token_len_per_gpu"] = at["log_budget"]
    if config.needs_critic:
        found["critic.forward_max_token_len_per_gpu"] = at["log_budget"]
    found[f"{_POLICY}.rollout.tensor_model_parallel_size"] = at["rollout_tensor"]
    found[f"{_POLICY}.rollout.gpu_memory_utilization"] = at["cache_share"]
    return found


def _values(space: Space, choice: Choice) -> dict[str, Any]:
    return {name: space[name][place] for name, place in zip(LEVERS, choice, strict=True)}


def possible(config: TrainConfig, shape: ModelShape, space: Space, choice: Choice) -> bool:
    """Return whether a choice is a valid config.

    The parallel sizes must divide the devices, heads and layers. The token budgets must be at least the
    longest sequence.
    """
    at = _values(space, choice)
    longest = config.actor_rollout_ref.rollout.longest(config.data)
    devices, d = config.trainer.devices_of("actor"), shape.decoder
    split = at["tensor"] * at["stages"]
    parts = devices // split
    shards = parts if at["shards"] == -1 else at["shards"]
    return (
        devices % (split * at["sequence"]) == 0
        and not any(count % at["tensor"] for count in (d.heads, d.key_heads, d.intermediate))
        and d.heads // at["tensor"] % at["sequence"] == 0
        and at["stages"] <= d.layers
        and (shards <= parts and parts % shards == 0)
        and not (
            at["stages"] > 1
            and (at["recompute"] == "full,offload" or config.actor_rollout_ref.model.lora_rank)
        )
        and min(at["budget"], at["log_budget"]) * at["sequence"] >= longest
    )
