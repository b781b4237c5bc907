"""The navigation of the site. Each page provides its own title."""

from __future__ import annotations

Part = str | tuple[str, tuple["Part", ...]]
"""A page, or a title with the entries below it.

A name that ends in / means all pages of that folder that no other entry names. REST means all remaining
pages.
"""

REST = "*"

NAV: tuple[Part, ...] = (
    (
        "Start",
        (
            "index.md",
            "quickstart.md",
            "from-python.md",
            "command-line.md",
            "reading-a-run.md",
            "support.md",
            "models.md",
            "measurements.md",
        ),
    ),
    (
        "Tutorials",
        (
            "tutorials/index.md",
            "tutorials/own-reward.md",
            "tutorials/own-data.md",
            "tutorials/own-algorithm.md",
            "tutorials/reward-model.md",
            "tutorials/two-processes.md",
            "tutorials/two-machines.md",
            "examples/recipes.md",
            "tasks.md",
        ),
    ),
    (
        "Concepts",
        (
            "concepts/index.md",
            "concepts/controller.md",
            "concepts/data.md",
            "concepts/engines.md",
            "concepts/staleness.md",
            "concepts/trust.md",
        ),
    ),
    (
        "Guide",
        (
            "commands.md",
            (
                "Data and rewards",
                ("data.md", "rewards.md", "sandbox.md", "reward-models.md", "tasks-museum.md"),
            ),
            (
                "Watching a run",
                ("viewer.md", "replay.md", "loggers.md", "museum.md", "failures.md", "messages.md"),
            ),
            (
                "Size and speed",
                (
                    *("large-models.md", "mixtures.md", "memory.md", "before-a-run.md", "performance.md"),
                    *("bench.md", "scoreboard.md"),
                ),
            ),
            ("Many machines", ("multi-node.md", "deployment.md", "examples/cluster.md")),
            ("Models and engines", ("rollout-engines.md", "examples/reward_model.md")),
            ("More", (REST,)),
        ),
    ),
    (
        "Algorithms",
        (
            "choosing.md",
            "algorithms/README.md",
            "algorithms/tests.md",
            "results/learning_curves.md",
            "algorithms/",
        ),
    ),
    (
        "Extend",
        (
            "your-own-algorithm.md",
            "extend/reward.md",
            "extend/dataset.md",
            "extend/worker.md",
            "extend/engine.md",
        ),
    ),
    (
        "Coming from",
        (
            ("verl", ("verl/keys.md", "verl/commands.md", "verl/environment.md", "verl-differences.md")),
            ("verl, tested", ("verl-rewards.md", "verl-tests.md")),
            "from-trl.md",
            "from-openrlhf.md",
        ),
    ),
    (
        "Questions",
        (
            "questions/index.md",
            "questions/basics.md",
            "questions/advanced.md",
            "questions/systems.md",
            "questions/coding.md",
            "questions/debugging.md",
        ),
    ),
    ("Reference", (("Config", ("config/index.md", "config/")), ("Python", ("api/index.md", "api/")))),
    ("Project", ("design.md", "contributing.md", "changelog.md")),
)
