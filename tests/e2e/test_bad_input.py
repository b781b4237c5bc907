"""Input that is refused before training: exit status 1, one error, and nothing is written."""

import pytest
import torch

from tests.e2e.shop import finish, start
from tests.support.tiny import make_model
from tests.support.words import full, rows

REFUSED = """
R.temperature=-1 | R.temperature "-1" "number > 0"
A.ppo_mini_batch_size=8 | A.ppo_mini_batch_size "8" "at most 4" "set"
A.ppo_mini_batch_size=3 | A.ppo_mini_batch_size "3" "divisor of 4" "=2"
A.ppo_max_token_len_per_gpu=13 | A.ppo_max_token_len_per_gpu "at least 14" "=14"
A.ulysses_sequence_parallel_size=2 | A.ulysses_sequence_parallel_size "=1"
trainer.placement={critc: global_pool} | trainer.placement "critc" "critic"
trainer.placement={critic: globl_pool} | trainer.placement "globl_pool" "global_pool"
trainer.nnodes=2 | trainer.resource_pools "1 + 1 process(es) on 2 node(s)" "trainer.nnodes"
custom_reward_function.path=/nowhere.py | custom_reward_function.path "/nowhere.py"
data.max_prompt_length=3 | data.max_prompt_length "all 24 prompts" "raise"
"""


@pytest.mark.parametrize(("word", "telling"), rows(REFUSED))
def test_a_config_that_cannot_be(user, word, telling):
    field, *texts = telling.split(' "')
    user.is_refused(word, telling=(full(field), *(text.rstrip('"') for text in texts)))


def test_everything_wrong_with_a_config_is_said_at_once(user):
    outcome = user.is_refused("data.foo=1", "trainer.nnodes=two", "trainer.save_freq=-5", telling=())
    assert outcome.error.startswith("tandem train: 3 error(s) in the config")


def test_a_real_process_says_it_too(shop, tmp_path):
    done = finish(start(shop.short("unused", "data.train_batchsize=4"), tmp_path))
    assert done.returncode == 1
    assert "data.train_batchsize: unknown key" in done.stderr and "data.train_batch_size" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device")
def test_a_device_that_is_not_there(user):
    user.is_refused("trainer.device=cuda", telling=("trainer.device", "cuda:0", "trainer.device=cpu"))


DAMAGE = {  # a file of the model, what is in it, and a part of the error
    "garbled": ("config.json", "{", "config.json"),
    "weightless": ("model.safetensors", None, "contains no weights"),
    "torn": ("model.safetensors", "torn", "weights cannot be loaded"),
    "speechless": ("tokenizer.json", None, "no tokenizer"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_model_folders_that_cannot_be_used(user, name):
    file, content, telling = DAMAGE[name]
    folder = make_model(user.folder / name)
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    outcome = user.types(f"M.path={folder}")
    assert outcome.status == 1
    assert all(text in outcome.error for text in (telling, str(folder), "model.path", "remedy"))


def test_no_chat_template(user):
    folder, key = make_model(user.folder / "model"), "actor_rollout_ref.model.custom_chat_template="
    (folder / "chat_template.jinja").unlink()
    user.is_refused(f"M.path={folder}", telling=("tokenizer.chat_template", str(folder), key))
    template = "\"{% for m in messages %}{{ m['content'] }}{% endfor %}\""
    assert user.types(f"M.path={folder}", f"{key}{template}").status == 0


@pytest.mark.parametrize(
    ("content", "telling"),
    [
        ("def score(a):\n    return 1\n", ("custom_reward_function.name", "score")),
        ("def compute_score(text):\n    return 1\n", ("which responses the function needs", "solution_str")),
        ("import nowhere\n", ("custom_reward_function.path", "No module named 'nowhere'")),
    ],
)
def test_a_reward_file_that_cannot_be_used(user, content, telling):
    file = user.folder / "own_reward.py"
    file.write_text(content)
    user.is_refused(f"custom_reward_function.path={file}", telling=telling)


def test_a_run_folder_that_is_a_file_or_below_one(user):
    file = user.folder / "file"
    file.touch()
    for folder in (file, file / "run"):
        outcome = user.types(f"trainer.default_local_dir={folder}")
        assert outcome.status == 1
        assert "trainer.default_local_dir: this folder is not writable" in outcome.error
        assert str(file) in outcome.error
