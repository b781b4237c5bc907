import torch

from tests.workers import roles


def test_what_no_folder_holds_of_a_critic_is_drawn_by_the_runs_seed(tmp_path):
    folder = roles.make_folder(tmp_path / "models")

    def drawn(seed):
        config = roles.make_config(folder, "critic.model.lora_rank=2", f"trainer.seed={seed}")
        module = roles.make_critic(config).engine.module
        return {name: p.detach().clone() for name, p in module.named_parameters() if "lora_A" in name}

    first, again, other = drawn(0), drawn(0), drawn(7)
    assert first and first.keys() == other.keys()
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not any(torch.equal(value, other[name]) for name, value in first.items())
