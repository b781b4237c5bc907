"""Sizes that follow from a config, compared with numbers computed by hand."""

from tandem.config.sizes import derived


def test_sizes_with_a_critic(load):
    config = load(
        "data.train_batch_size=96 data.max_prompt_length=100 data.max_response_length=28 R.n=4",
        "A.ppo_mini_batch_size=32 A.ppo_epochs=2 A.ppo_micro_batch_size_per_gpu=8 A.use_kl_loss=true",
        "critic.ppo_mini_batch_size=48 critic.use_dynamic_bsz=true",
        "trainer.total_epochs=3 trainer.critic_warmup=5",
    ).config
    assert derived(config, train_rows=1000) == {
        "devices": 1, "prompts per step": 96, "samples per step": 384, "longest sequence": 128,
        "tokens per step at most": 49152, "actor mini-batches per step": 3,
        "samples per actor mini-batch": 128, "actor optimizer steps per step": 6,
        "micro-batches, actor update": "at most 8 samples per device",
        "micro-batches, old log-probs": "all samples at once",
        "micro-batches, reference log-probs": "all samples at once",
        "critic mini-batches per step": 2, "critic optimizer steps per step": 4,
        "micro-batches, critic update": "at most 32768 tokens per device",
        "micro-batches, values": "at most 32768 tokens per device",
        "steps per epoch": 10, "steps": 30, "actor optimizer steps": 150,
    }  # fmt: skip


def test_steps_depend_on_the_rows_unless_given(load):
    assert {"steps", "steps per epoch"}.isdisjoint(derived(load().config))
    for given, optimizer_steps in (("steps=7", 7), ("steps=7 A.ppo_mini_batch_size=256", 28)):
        sizes = derived(load(given).config)
        assert (sizes["steps"], sizes["actor optimizer steps"]) == (7, optimizer_steps)


def test_phases_that_do_not_run_have_no_sizes(load):
    sizes = derived(load("GRPO").config)
    assert not [name for name in sizes if "critic" in name or "reference" in name or "values" in name]


def test_generation_batches_and_group_sizes_are_told_where_they_differ(load):
    plain = derived(load("R.n=2").config)
    sizes = derived(load("R.n=2 R.n_schedule={10: 4} F.enable=true data.gen_batch_size=1536").config)
    assert sizes["prompts per generation batch"] == 1536
    assert sizes["responses per prompt"] == "2 from step 1, 4 from step 10; the sizes below assume 2"
    assert set(sizes) - set(plain) == {"prompts per generation batch", "responses per prompt"}
