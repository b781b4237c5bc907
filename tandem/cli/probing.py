"""The measurement of `tandem plan --probe`: responses to a few prompts, with their scores and times."""

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
    """The results of a probe.

    Args:
        path: the file that the config was loaded from, if any. Everything that the run needs must be on
            this machine.
        overrides: the key=value words that the config was loaded from.
        options: the options `--probe` and `--probe-seconds`.

    Attributes:
        report: the estimates for the whole run, see `tandem.trainer.probe.report`.

    Raises:
        TandemError: the run cannot start on this machine, or sampling fails.
    """

    def __init__(self, path: str | None, overrides: Sequence[str], options: Mapping[str, str]) -> None:
        groups, limit = (_whole(name, options.get(name) or str(least)) for name, least in _DEFAULTS.items())
        config = load_train_config(path, overrides, count_rows=count_rows).config
        refuse(lacking(config))
        warn(f"sampling {groups} prompts in a temporary folder, for about {limit} s at most")
        module, planning = map(import_module, ("tandem.trainer.probe", "tandem.trainer.planning"))
        with redirect_stdout(sys.stderr):  # the output of workers is not part of the plan
            self._seen: Seen = module.run_probe(config, groups=groups, limit_s=limit, say=warn)
        self.report: dict[str, Any] = {"asked": groups, **module.report(self._seen, config)}
        self._here = not {"--device", "--devices", "--fit"} & set(options)
        self._device = "cpu" if planning.on_cpu(config.trainer) else "cuda"

    def placed(self, config: TrainConfig) -> TrainConfig:
        """Return the config with this machine's device, if the run uses devices of this machine."""
        return with_value(config, "trainer.device", self._device) if self._here else config

    def lengths(self, config: TrainConfig) -> Lengths:
        """Return the lengths of a step's sequences, by repeating the lengths of the sampled groups."""
        rows = np.arange(config.data.train_batch_size) % len(self._seen.prompts)
        return Lengths(self._seen.prompts[rows], self._seen.responses[rows])

    def seconds(
        self, config: TrainConfig, step: Callable[[Lengths], Mapping[str, float]] | None = None
    ) -> dict[str, float]:
        """Return a dict from phase of a step to seconds. Generation and scoring use measured times.

        Args:
            config: the config.
            step: returns the modeled seconds for given lengths, which accounts for the higher speed of larger
                batches; None: only generation and scoring are returned, at their measured rates.
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
        """Return the measured seconds of generation divided by the modeled seconds.

        The first batch includes warm-up, and does not count if there are other batches.
        """
        ends = accumulate(groups for groups, *_ in self._seen.batches)
        timed = list(zip(ends, self._seen.batches, strict=True))
        taken = by_model = 0.0
        for end, (groups, seconds, _) in timed[1:] or timed:
            rows = slice(end - groups, end)
            lengths = Lengths(self._seen.prompts[rows], self._seen.responses[rows])
            taken, by_model = taken + seconds, by_model + step(lengths)["generate_sequences"]
        return taken / by_model

    def _generations(self, config: TrainConfig) -> float:
        """Return the number of answered prompts per training prompt of a step, rounded up to whole batches.

        If no sampled group would be used, the result is a lower bound.
        """
        used, size = self.report["generated_per_used"], config.data.train_batch_size
        each = config.data.prompts_at_a_time
        return 1.0 if used is None else math.ceil((used["value"] or used["low"]) * size / each) * each / size

    def print(self, seconds: Mapping[str, float]) -> None:
        """Print the results.

        Args:
            seconds: the seconds of a step's phases.
        """
        found = self.report
        groups = "groups that teach" if found["compares_groups"] else "groups whose rewards differ"
        shares = {groups: "teach"} if found["n"] > 1 else {}
        shares |= {"all right": "all_right", "all wrong": "all_wrong"}
        lengths = {"mean": "response_length", "median": "median", "p95": "p95", "p99": "p99"}
        say(f"\n{found['groups']} of {found['asked']} prompts, {found['n']} responses each; 95% intervals:")
        _rows(found, shares, "{:.1%}")
        if found["generated_per_used"]:
            _rows(found, {"answered per prompt used in training": "generated_per_used"}, "{:.2f}")
        _rows(found, {"mean reward": "reward"}, "{:.3g}")
        if found["compares_groups"] is False:
            say("  the estimator does not compare groups: a response teaches by its distance from a baseline")
        elif not found["teach"]["value"]:
            say("  the run would learn nothing: use easier or harder prompts, or more responses per prompt")
        say(f"tokens per response, {found['longest']} in the longest:")
        _rows(found, lengths, "{:,.1f}")
        _rows(found, {"cut at the limit": "cut"}, "{:.1%}")
        tail = "" if found["reward_s_p95"] is None else f", p95 of calls {found['reward_s_p95']:.3g}"
        failed, late = (found["reward_failures"][name] for name in ("failed", "timeouts"))
        share = seconds["reward"] / seconds["step"]
        say(f"seconds per reward: mean {found['reward_s']:.3g}{tail}; {seconds['reward']:.3g} per step,")
        say(f"  {share:.1%} of it without overlap; {failed:.1%} failed, {late:.0f} over the time limit")


def _rows(found: Mapping[str, Any], names: Mapping[str, str], form: str) -> None:
    for title, name in names.items():
        value, low, high = (
            "no limit" if each is None else form.format(each)
            for each in map(found[name].get, ("value", "low", "high"))
        )
        say(f"  {title:<38} {value:>8}   {low} to {high}")


def _whole(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError("must be a whole number above 0", field=name, got=text)
    return int(text)
