"""The activations to recompute in the backward pass are chosen by the free memory."""

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, GPT2Config

from tandem.engines.train import recomputation
from tandem.engines.train.base import MicroBatching
from tandem.errors import DeviceMemoryError
from tests.engines.train import synthetic
from tests.engines.train.on_ranks import gathered, on_ranks, seven_or_three

LOSS, MICRO = synthetic.SyntheticLoss(), synthetic.CUTS["three"]
TOKENS = 3 * 30 + 23 + 17 + 12  # enough for any three rows
HUGE = 2**40


class Heard(list):
    """The messages of an engine."""

    @property
    def choices(self):
        return [sentence.split(":")[1].strip() for sentence in self]


@pytest.fixture
def free(monkeypatch):
    """Return a function that sets the free bytes of the host."""

    def to(count):
        monkeypatch.setattr(recomputation, "host_free", lambda: count)

    to(HUGE)
    return to


def engine_on(folder, **options):
    heard = Heard()
    return synthetic.make_engine(folder, say=heard.append, **options), heard


def micro_batches(engine, batch=None, micro=MICRO):
    return list(engine._micro_batches(batch or synthetic.make_batch(), LOSS.columns, micro))


def needed(engine, tokens=None):
    """Return the bytes of each choice for this many tokens, or for the engine's own number of tokens."""
    own, parts = engine._recomputation, micro_batches(engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own, "_tokens", tokens or own._tokens)
        return own._needed(parts, MICRO)


def step(engine, rows=10, micro=MICRO):
    return synthetic.gradients(engine, synthetic.make_batch()[:rows], LOSS, micro)[0]


def test_the_fastest_that_fits_is_chosen_and_said(folder, free):
    probe, _ = engine_on(folder)
    step(probe)
    sizes = needed(probe)
    assert sizes["none"] > sizes["ops"] > sizes["full"]
    wanted = step(synthetic.make_engine(folder, model={"gradient_checkpointing_mode": "full"}))
    for mode, room in (
        *(("none", sizes["none"]), ("ops", sizes["none"] - 1), ("ops", sizes["ops"])),
        *(("full", sizes["ops"] - 1), ("full", sizes["full"]), ("full", sizes["full"] - 1)),
    ):
        free(2 * room)  # half of the free memory stays unused
        engine, heard = engine_on(folder)
        assert synthetic.relative_difference(step(engine), wanted) <= 1e-12
        assert engine._recomputation._switch.mode == mode and heard.choices == [mode]
        assert f" {sizes[mode] / 2**20:.1f} MiB of " in heard[0]
        assert ("; none would" in heard[0]) == (mode != "none")
        assert ("not be enough" in heard[0]) == (room < sizes["full"])
        step(engine)
        assert len(heard) == 1


def test_what_a_rank_has_is_counted_from_its_module(folder, free):
    engine = engine_on(folder)[0]
    own = engine._recomputation._gathered()
    units = [sum(p.numel() for p in unit) for unit in synthetic.units(engine).values()]
    assert own.whole == own.trained == sum(value.numel() for _, value in engine.weights())
    assert own.layers == 3 and own.layer in units and own.head == 31 * 32 == own.root - 32


def test_it_is_made_again_for_more_tokens_and_for_no_fewer(folder, free):
    engine, heard = engine_on(folder)
    step(engine, rows=3)
    few = engine._recomputation._tokens
    assert few == int(1.25 * (5 + 17 + 30 - 3)) and heard.choices == ["none"]
    free(2 * needed(engine, few)["none"])
    step(engine, rows=2)
    assert engine._recomputation._tokens == few and len(heard) == 1
    step(engine, rows=10, micro=MicroBatching())
    assert engine._recomputation._tokens > few and heard.choices == ["none", "full"]


def test_a_budget_bounds_a_gpu_and_no_cpu(folder, free, monkeypatch):
    monkeypatch.setattr(recomputation, "_free_bytes", lambda device: HUGE)
    engine, heard = engine_on(folder)
    own = engine._recomputation
    with monkeypatch.context() as on_a_gpu:
        on_a_gpu.setattr(own, "_device", torch.device("cuda"))
        own.fit(micro_batches(engine), MicroBatching(max_tokens=16384), engine._try_forward)
    assert own._tokens == 16384 and heard.choices == ["none"]
    engine, _ = engine_on(folder)
    step(engine, micro=MicroBatching(max_tokens=4000))
    seen = sum(synthetic.LENGTHS) - sum(n > 1 for n in synthetic.LENGTHS)
    assert engine._recomputation._tokens == int(1.25 * seen)


def test_what_the_user_chose_stays(folder, free):
    free(0)
    for kept in ("none", "ops", "first"):
        engine, heard = engine_on(folder, model=synthetic.KEPT[kept])
        step(engine)
        assert heard == [] and engine._recomputation._switch is None
    frozen, heard = engine_on(folder, frozen=True)
    assert frozen._recomputation._switch is None and heard == []


def test_compiled_layers_run_again_as_a_whole_or_not_at_all(folder, free, monkeypatch):
    for _ in range(2):
        engine, heard = engine_on(folder)
        monkeypatch.setattr(engine._recomputation, "_compiled", True)
        step(engine)
        free(2 * needed(engine)["none"] - 2)
    assert heard.choices == ["full"] and "ops" not in heard[0]


def test_layers_of_any_kind_are_measured(tmp_path, free):
    AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=31, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0)
    ).save_pretrained(tmp_path)
    engine, heard = engine_on(tmp_path)
    step(engine)
    sizes = needed(engine)
    assert heard.choices == ["none"] and sizes["none"] > sizes["full"]


def test_with_activations_on_the_host_the_inputs_of_layers_go_there(folder, free):
    engine, heard = engine_on(folder, model={"enable_activation_offload": True})
    step(engine)
    (sentence,) = heard
    assert engine._recomputation._switch.mode == "full"
    assert sentence.startswith("recomputation: full") and "offloaded" in sentence


def test_out_of_memory_names_the_keys(folder, free, monkeypatch):
    def fail(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nAnd more.")

    again, offload = "set gradient_checkpointing_mode=full, then ", "set enable_activation_offload=true"
    for kept, remedy in ((None, again), ("full", offload), ("none", again)):
        engine, heard = engine_on(folder, model=synthetic.KEPT.get(kept))
        monkeypatch.setattr(engine._execution, "gradients", fail)
        with pytest.raises(DeviceMemoryError, match="GPU") as caught:
            step(engine)
        error = caught.value
        assert error.field == "gradient_checkpointing_mode" and error.remedy.startswith(remedy)
        assert error.got.startswith("CUDA out of memory. Tried to allocate 2.00 GiB.")
        assert error.got.endswith("".join(heard))


def test_other_errors_pass_and_one_within_a_schedule_is_found(folder, free):
    own = engine_on(folder)[0]._recomputation
    with pytest.raises(RuntimeError, match="sizes do not match"), own.out_of_memory():
        raise RuntimeError("sizes do not match")
    with pytest.raises(DeviceMemoryError, match="GPU"), own.out_of_memory():
        raise RuntimeError("stage 1 failed") from torch.OutOfMemoryError("CUDA out of memory.")


# Two ranks.

WIDE = {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 6, "num_key_value_heads": 2}
SHARED = {"layers": {"fsdp": {"tensor_parallel_size": 2}}, "tokens": {"sequence_parallel": 2}, "rows": {}}


def kept_per_token(wide, options):
    """Return the bytes that are kept per token and layer, as offloaded and as measured before an update."""
    engine = synthetic.engine_keeping(wide, "none", "copied", "fp32", **options)
    batch, micro = synthetic.make_batch(torch.float32), MicroBatching()
    mine = batch if options else seven_or_three(batch, share=5)
    _, metrics = synthetic.gradients(engine, mine, LOSS, micro)
    parts = micro_batches(engine, mine, micro)
    tokens = sum(len(part.inputs.input_ids) for part in parts)
    tokens = tokens if options else sum(gathered(tokens))  # the ranks have different rows
    counted = metrics["activation_offload_bytes"] / 2  # the last of three layers is not offloaded
    other, _ = engine_on(wide, precision="fp32", **options)
    synthetic.gradients(other, mine, LOSS, micro)
    return counted / tokens, other._recomputation._layer.saved


def chosen(folder, wide):
    heard, modes = [], []
    for others in (HUGE, 0):
        engine = synthetic.make_engine(folder, say=heard.append)
        recomputation.host_free = lambda others=others: others if dist.get_rank() else HUGE
        synthetic.gradients(engine, seven_or_three(synthetic.make_batch()), LOSS, MICRO)
        modes.append(engine._recomputation._switch.mode)
    kept = {name: kept_per_token(wide, options) for name, options in SHARED.items()}
    return {"kept": kept, "heard": heard, "modes": modes, "tokens": engine._recomputation._tokens}


@pytest.mark.slow
def test_ranks_agree_on_the_most_careful_choice_and_what_they_share_is_counted(folder, tmp_path):
    first, second = on_ranks(chosen, folder, synthetic.save_model(tmp_path, **WIDE))
    assert first["modes"] == second["modes"] == ["none", "full"]
    assert ["another rank" in each["heard"][1] for each in (first, second)] == [True, False]
    assert first["tokens"] == second["tokens"]
    for name, (counted, estimated) in (*first["kept"].items(), *second["kept"].items()):
        assert estimated == pytest.approx(counted, rel=0.15), name
    assert first["kept"]["layers"][0] < 0.8 * first["kept"]["rows"][0]
