"""Which modules read a key, derived from the code; every key is read."""

from docs import readers as derivation
from docs.readers import readers
from tandem.config import explain
from tandem.config.generate import EvalConfig, GenerateConfig
from tandem.config.root import TrainConfig
from tandem.config.schema import keys
from tandem.config.supervised import RMConfig, SFTConfig

ROOTS = (TrainConfig, SFTConfig, RMConfig, GenerateConfig, EvalConfig)
SETTLED = {"strategy", "tensor_model_parallel_size", "defaults", "override_config", "resize_embeddings"}
"""Keys that have only one allowed value, and keys that only loading the config reads."""


def test_the_table_that_ships_is_that_of_the_code():
    """If this test fails, run `python -m docs.readers` to write the table again."""
    assert {command: explain.readers(command) for command in explain.COMMANDS} == derivation.table()


def test_every_key_is_read_by_a_module():
    unread = [
        f"{root.__name__} {name}"
        for root in ROOTS
        for name, modules in readers(root).items()
        if not modules
        and name.rsplit(".", 1)[-1] not in SETTLED
        and not any(other.inherits == name for other in keys(root).values())
    ]
    assert unread == []


TOY = """
from dataclasses import dataclass

@dataclass
class Holder:
    settings: OptimConfig | None

class Worker:
    def __init__(self, config: TrainConfig):
        self.config = config
        self.optim = config.critic.optim

    def step(self):
        for section in (self.config.algorithm, self.config.data):
            print(section)
        actor, data = self.config.actor_rollout_ref.actor, self.config.data
        return self.optim.lr, data.seed, self.config.exact_kl, actor.fsdp_config.model_copy()

def whole(config: FSDPConfig) -> bool:
    return config.param_offload

def named(config: ModelConfig):
    return [getattr(config, name) for name in ("lora_rank", "nothing")]

def held(holder: Holder):
    return holder.settings.eps

def other(config: dict):
    return config.gamma
"""


def test_what_a_module_reads_is_followed_by_types(tmp_path, monkeypatch):
    package = tmp_path / "tandem"
    (package / "config").mkdir(parents=True)
    for source in (derivation.PACKAGE / "config").glob("*.py"):
        (package / "config" / source.name).write_text(source.read_text())
    (package / "toy.py").write_text(TOY)
    monkeypatch.setattr(derivation, "PACKAGE", package)
    monkeypatch.setattr(derivation, "_reads", derivation._reads.__wrapped__)
    found = {name for name, modules in readers.__wrapped__(TrainConfig).items() if modules == ["tandem.toy"]}
    policy, everywhere = "actor_rollout_ref", ("critic", "reward_model")
    assert found == {
        "critic.optim.lr", "critic.optim.eps", f"{policy}.actor.optim.eps", "data.seed",
        f"{policy}.model.lora_rank",
        "algorithm.use_kl_in_reward", "algorithm.kl_penalty", f"{policy}.actor.use_kl_loss",
        f"{policy}.actor.kl_loss_type",
        *(f"{at}.fsdp_config.param_offload" for at in (*everywhere, f"{policy}.actor", f"{policy}.ref")),
    }  # fmt: skip
