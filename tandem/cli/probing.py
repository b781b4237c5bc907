"""`tandem plan --probe`: what a few prompts, answered and scored, say of a run and of its seconds."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from tandem.cli.signals import import_module
from tandem.config.load import load_train_config
from tandem.config.root import TrainConfig
from tandem.data.files import count_rows
from tandem.errors import ConfigError
from tandem.memory.levers import with_value
from tandem.memory.seconds import Lengths
from tandem.observability.terminal import say, warn
from tandem.trainer.here import lacking, refuse

if TYPE_CHECKING:
    from tandem.trainer.probe import Seen

_DEFAULTS = {"--probe": 32, "--probe-seconds": 600}


class Probing:
    """A probe that was made.

    Args:
        path, overrides: of the config, of which nothing may be missing here.
        options: `--probe`, `--probe-seconds`.

    Attributes:
        report: see `tandem.trainer.probe.report`.

    Raises:
        TandemError: the run could not begin here, or a sample cannot be made.
    """

    def __init__(self, path: str | None, overrides: Sequence[str], options: Mapping[str, str]) -> None:
        groups, limit = (_whole(name, options.get(name) or str(least)) for name, least in _DEFAULTS.items())
        config = load_train_config(path, overrides, count_rows=count_rows).config
        refuse(lacking(config))
        warn(f"samples {groups} prompts in a temporary folder, for about {limit} s at most")
        module, planning = map(import_module, ("tandem.trainer.probe", "tandem.trainer.planning"))
        with redirect_stdout(sys.stderr):  # what workers tell is no part of the plan
            self._seen: Seen = module.run_probe(config, groups=groups, limit_s=limit, say=warn)
        self.report: dict[str, Any] = {"asked": groups, **module.report(self._seen, config)}
        self._here = not {"--device", "--devices", "--fit"} & set(options)
        self._device = "cpu" if planning.on_cpu(config.trainer) else "cuda"

    def placed(self, config: TrainConfig) -> TrainConfig:
        """The config on the devices of this machine, where they are the run's."""
        return with_value(config, "trainer.device", self._device) if self._here else config

    def lengths(self, config: TrainConfig) -> Lengths:
        """Those of a step: the groups that were seen, over and over."""
        rows = np.arange(config.data.train_batch_size) % len(self._seen.prompts)
        return Lengths(self._seen.prompts[rows], self._seen.responses[rows])

    def seconds(
        self, config: TrainConfig, step: Callable[[Lengths], Mapping[str, float]] | None = None
    ) -> dict[str, float]:
        """The seconds of a step's phases, writing and scoring as they were seen.

        Args:
            step: gives them for lengths by the model of time; None: of these two phases alone, by their
                rates. More responses at a time are written faster.
        """
        lengths = self.lengths(config)
        responses, again = lengths.responses.ravel(), self._generations(config)
        scored = self.report["reward_s"] * len(responses) * again
        if step is None:
            written = again * float(responses.sum()) / self.report["tokens_per_s"]
            return {"generate_sequences": written, "reward": scored, "step": written + scored}
        found = dict(step(lengths))
        written = found["generate_sequences"] * again * (self._slower(step) if self._here else 1.0)
        found["step"] += written - found["generate_sequences"] + scored - found["reward"]
        return found | {"generate_sequences": written, "reward": scored}

    def _slower(self, step: Callable[[Lengths], Mapping[str, float]]) -> float:
        """The seconds of writing over those of the model of time. The first batch, which also warmed up, does
        not count where there are others."""
        ends = accumulate(groups for groups, *_ in self._seen.batches)
        timed = list(zip(ends, self._seen.batches, strict=True))
        taken = by_model = 0.0
        for end, (groups, seconds, _) in timed[1:] or timed:
            rows = slice(end - groups, end)
            lengths = Lengths(self._seen.prompts[rows], self._seen.responses[rows])
            taken, by_model = taken + seconds, by_model + step(lengths)["generate_sequences"]
        return taken / by_model

    def _generations(self, config: TrainConfig) -> float:
        """Prompts that are answered in a step for each that is learnt from, in whole batches; where none was
        seen that would be, the fewest that may be."""
        used, size = self.report["generated_per_used"], config.data.train_batch_size
        each = config.data.prompts_at_a_time
        return 1.0 if used is None else math.ceil((used["value"] or used["low"]) * size / each) * each / size

    def print(self, seconds: Mapping[str, float]) -> None:
        """Prints what was seen.

        Args:
            seconds: of a step's phases.
        """
        found = self.report
        groups = "groups that teach" if found["compares_groups"] else "groups whose rewards differ"
        shares = {groups: "teach"} if found["n"] > 1 else {}
        shares |= {"all right": "all_right", "all wrong": "all_wrong"}
        lengths = {"mean": "response_length", "median": "median", "p95": "p95", "p99": "p99"}
        say(
            f"\n{found['groups']} of {found['asked']} prompts, {found['n']} responses each; intervals of 95%:"
        )
        _rows(found, shares, "{:.1%}")
        if found["generated_per_used"]:
            _rows(found, {"answered for each that is learnt from": "generated_per_used"}, "{:.2f}")
        _rows(found, {"mean reward": "reward"}, "{:.3g}")
        if found["compares_groups"] is False:
            say("  the estimator compares no groups: a response teaches by how far it is from a baseline")
        elif not found["teach"]["value"]:
            say("  nothing would be learnt: take easier or harder prompts, or more responses to each")
        say(f"tokens of a response, {found['longest']} in the longest:")
        _rows(found, lengths, "{:,.1f}")
        _rows(found, {"cut at the limit": "cut"}, "{:.1%}")
        tail = "" if found["reward_s_p95"] is None else f", p95 of calls {found['reward_s_p95']:.3g}"
        failed, late = (found["reward_failures"][name] for name in ("failed", "timeouts"))
        share = seconds["reward"] / seconds["step"]
        say(f"seconds of a reward: mean {found['reward_s']:.3g}{tail}; {seconds['reward']:.3g} of a step,")
        say(f"  {share:.1%} of it if nothing goes on beside; {failed:.1%} failed, {late:.0f} over the limit")


def _rows(found: Mapping[str, Any], names: Mapping[str, str], form: str) -> None:
    for title, name in names.items():
        value, low, high = (
            "no end" if each is None else form.format(each)
            for each in map(found[name].get, ("value", "low", "high"))
        )
        say(f"  {title:<38} {value:>8}   {low} to {high}")


def _whole(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError("no whole number above 0", field=name, got=text)
    return int(text)
