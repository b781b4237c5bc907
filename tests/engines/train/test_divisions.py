"""Training on two and four ranks, however the model and the rows are divided, equals training on one rank."""

import itertools
import time
from functools import cache

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

from tandem.engines.weight_sync import digest
from tandem.errors import DataError, EngineError, ModelError, TandemError
from tandem.models import weight_files
from tandem.models.collectives import CollectiveMeter
from tandem.models.sequence_parallel import SequenceSplit
from tests.engines.train import matrix, synthetic
from tests.engines.train.matrix import DIVISIONS, FEATURES, engine_of
from tests.engines.train.on_ranks import on_ranks
from tests.engines.train.synthetic import same
from tests.support.marks import slow_but

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5}
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def alone(models):
    """Return a function that trains on one rank."""
    found = {}

    def trained(what):
        if str(what) not in found:
            found[str(what)] = matrix.record(models, what)
        return found[str(what)]

    return trained


@pytest.fixture(scope="module")
def group(models):
    """Return a function that trains a group of cells on several ranks."""
    return cache(lambda name: on_ranks(matrix.records, models, matrix.CELLS[name], ranks=int(name[0])))


class Cell:
    """What the ranks and a single rank found of one cell."""

    def __init__(self, group, alone, name, feature, division):
        self.group, self.feature, self.division = name, feature, division
        self.ranks = [found[feature, division] for found in group(name)]
        self.what = FEATURES[feature][0]
        self.alone = alone(self.what)
        self.limit = TOLERANCE[self.what.get("precision", "fp64")]
        keys = DIVISIONS[division].get("fsdp", {})
        parts = "tensor", "expert", "pipeline"
        self.layers, self.experts, self.stages = (keys.get(f"{name}_parallel_size", 1) for name in parts)


@pytest.fixture(
    params=[matrix.param(name, (name, *cell)) for name, cells in matrix.CELLS.items() for cell in cells]
)
def cell(request, group, alone):
    return Cell(group, alone, *request.param)


def test_steps_are_those_of_one_rank(cell):
    wanted, limit = cell.alone, cell.limit
    for found in cell.ranks:
        assert same(found["started"], wanted["started"]) and same(found["drawn"], wanted["drawn"])
        assert found["shapes"] == {name: value.shape for name, value in wanted["started"].items()}
        pairs = list(zip(found["metrics"], wanted["metrics"], strict=True))
        if cell.feature == "bf16":
            (mine, theirs), *_ = pairs
            assert mine["entropy"] == pytest.approx(theirs["entropy"], rel=0.01)
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.1)
            continue
        for mine, theirs in pairs:
            assert {name: mine[name] for name in theirs} == pytest.approx(theirs, rel=limit, abs=limit)
            assert mine.get("activation_offload_bytes", 0) > 0 or "offloaded" not in cell.feature
        for key in ("weights", "trained") if wanted["trained"] else ("weights",):
            assert synthetic.relative_difference(found[key], wanted[key]) <= limit, key
    if cell.feature != "bf16":
        forward = matrix.led(cell.ranks, "forward")
        assert synthetic.relative_difference(forward, wanted["forward"]) <= limit


def test_all_ranks_end_with_the_same(cell):
    """Metrics and whole weights are equal bit by bit, and so are outputs of the same rows, and copies."""
    first, outputs, parts = cell.ranks[0], {}, {}
    for found in cell.ranks:
        assert found["metrics"] == first["metrics"] and same(found["weights"], first["weights"])
        assert list(found["weights"]) == list(found["shapes"]) and found["base"]
        assert same(outputs.setdefault(found["share"].rank, found["forward"]), found["forward"])
        for place, total in found["held"].items():
            assert parts.setdefault(place, total) == total, place
    if cell.layers > 1:  # of the norms at least, both ranks hold the same shard
        assert len({name for name, _, tensor in parts if tensor is None}) >= 5


def test_digests_are_those_of_the_whole_weights(cell):
    for found in cell.ranks:
        for dtype, sums in found["digests"].items():
            assert sums == digest(found["cast"][dtype].items())
            if not cell.alone["trained"]:  # adapters are merged before the cast
                assert sums == digest((name, value.to(dtype)) for name, value in found["weights"].items())


def test_each_rank_holds_its_part(cell):
    infos, whole = [found["info"] for found in cell.ranks], cell.alone["info"]
    for info in infos:
        for name in ("parameters", "trainable_parameters", "master_dtype", "compute_dtype"):
            assert info[name] == whole[name]
        assert info["world_size"] == len(cell.ranks)
    shards = DIVISIONS[cell.division].get("fsdp", {}).get("fsdp_size")
    copies = len(cell.ranks) // (shards * cell.layers * cell.stages) if shards else 1
    numbers = whole["parameters"]
    if cell.stages > 1 and cell.what.get("of", "qwen2") in matrix.TIED:  # both ends hold what is tied
        numbers += cell.alone["weights"][EMBEDDING].numel()
    wanted = copies * numbers * whole["parameters@cpu"] // whole["parameters"]
    held = [info["parameters@cpu"] for info in infos]
    experts = cell.what.get("of") in matrix.EXPERTS
    alike = 1 if cell.layers == 1 else 2 if experts else 1.3  # experts, norms and some adapters are not split
    assert wanted <= sum(held) <= alike * wanted
    assert max(held) <= ((0.5 if experts else 0.25) + copies / len(held)) * whole["parameters@cpu"]


def test_only_whole_modules_are_lent(cell):
    for found in cell.ranks:
        if max(cell.layers, cell.experts, cell.stages) > 1 or cell.alone["trained"]:
            assert found["lent"] is None
        else:
            assert cell.what.get("kind") or torch.equal(found["lent"], found["weights"][EMBEDDING])


def test_what_ranks_exchange_is_counted(cell, group):
    for found in cell.ranks:
        seconds, received = found["collectives"]
        assert seconds > 0 and received > 0
    if (cell.feature, cell.division) == ("plain", "tokens"):
        rows_apart = [found["plain", "shards"]["collectives"][1] for found in group(cell.group)]
        assert min(found["collectives"][1] for found in cell.ranks) > max(rows_apart)


def special(models):
    return {
        "exchanged": {division: exchanged(models, division) for division in ("shards", "layers", "stages")},
        "read": read_names(models),
        "refused": refusals(models),
    }


@pytest.fixture(scope="module", params=slow_but((), [2, 4]))
def specials(models, request):
    return on_ranks(special, models, ranks=request.param)


def log_probs(engine):
    rows = matrix.my_rows(engine, matrix.batch_for({}))
    return {"share": engine.share, "forward": {"log_probs": synthetic.output(engine, rows).values}}


def exchanged(models, division):
    """Load weights from an engine of which each rank holds other parts, in place of zeros."""
    source, target = engine_of(models), engine_of(models, DIVISIONS[division], frozen=True)
    matrix.train(source, matrix.my_rows(source, matrix.batch_for({})), steps=1)
    log_probs(target)  # whatever this leaves behind is out of date afterwards
    for parameter in target.module.parameters():
        parameter.detach().zero_()
    exported = synthetic.weights(source)
    names, said = list(exported), {}
    target.load_weights(reversed(exported.items()), 7)
    for what, given in (("missing", names[1:]), ("unknown", [*names, "model.more"])):
        try:
            target.load_weights([(name, exported.get(name, torch.zeros(1))) for name in given], 8)
        except EngineError as error:
            said[what] = error.field
    return {
        "weights": (exported, synthetic.weights(target)),
        "some": [name for name, _ in target.weights(names=names[3:5])] == names[3:5],
        "version": target.version,
        "same digest": target.digest() == source.digest(),
        "said": said == {"missing": names[0], "unknown": "model.more"},
        "outputs": (log_probs(source), log_probs(target)),
    }


def test_weights_of_another_division_arrive_whole(specials):
    for division in ("shards", "layers", "stages"):
        everywhere = [found["exchanged"][division] for found in specials]
        for found in everywhere:
            exported, loaded = found["weights"]
            assert list(loaded) == list(exported) and same(loaded, exported)
            assert found["version"] == 7 and found["some"] and found["same digest"] and found["said"]
        wanted, outputs = (
            matrix.led([found["outputs"][i] for found in everywhere], "forward")["log_probs"] for i in (0, 1)
        )
        assert torch.allclose(outputs, wanted, rtol=0, atol=1e-9)


def stepped(engine, what):
    """Take a step, and return the version and what was trained."""
    matrix.train(engine, matrix.my_rows(engine, matrix.batch_for(what)), steps=1)
    return engine.version, matrix.adapters(engine) or synthetic.weights(engine)


def journeys(models, saved, results, table):
    """Load checkpoints of one rank under each division and save them, then load each under each, and step.

    The key (feature, division, None) stands for going on without saving.
    """
    found = {}
    for feature, divisions in table.items():
        what, sources = FEATURES[feature][0], {"one rank": saved / feature}
        for division in divisions:
            engine = engine_of(models, what, DIVISIONS[division])
            engine.load(saved / feature)
            sources[division] = path = results / f"{feature}, {division}"
            engine.stage(path)() if division == "stages" else engine.save(path)
            found[feature, division, None] = stepped(engine, what)
        for division, (source, path) in itertools.product(divisions, sources.items()):
            engine = engine_of(models, what, DIVISIONS[division])
            engine.load(path)
            found[feature, division, source] = stepped(engine, what)
    return found


@pytest.mark.parametrize("group", [matrix.param(name, name) for name in matrix.JOURNEYS])
def test_checkpoints_go_from_any_division_to_any_other(models, tmp_path, group):
    """They go on bit for bit where the division is the same."""
    table, saved, results, wanted = matrix.JOURNEYS[group], tmp_path / "saved", tmp_path / "results", {}
    for feature in table:
        what = FEATURES[feature][0]
        engine = engine_of(models, what)
        stepped(engine, what)
        engine.save(saved / feature)
        _, wanted[feature] = stepped(engine, what)
    for found in on_ranks(journeys, models, saved, results, table, ranks=int(group[0])):
        assert len(found) == sum(len(divisions) * (len(divisions) + 2) for divisions in table.values())
        for (feature, division, source), (version, weights) in found.items():
            assert version == 2
            gap = synthetic.relative_difference(weights, wanted[feature])
            assert gap <= 1e-9, (feature, division, source)
            assert source != division or same(weights, found[feature, division, None][1])
    for feature, divisions in table.items():
        for path in (saved / feature, *(results / f"{feature}, {division}" for division in divisions)):
            engine = engine_of(models, FEATURES[feature][0])
            engine.load(path)
            _, weights = stepped(engine, FEATURES[feature][0])
            limit = 0 if path.parent == saved else 1e-9
            assert synthetic.relative_difference(weights, wanted[feature]) <= limit, path


def read_names(models):
    """Return this rank's stage and the names that it reads from the model's files."""
    names, read = set(), weight_files._read

    def noted(handle, name, part):
        names.add(name)
        return read(handle, name, part)

    weight_files._read = noted
    engine = engine_of(models, DIVISIONS["stages"], of="deep", frozen=True)
    weight_files._read = read
    return engine.grid.weights["pp"].get_local_rank(), names


def test_each_stage_reads_its_own_layers(specials):
    """Of five layers, the first of two stages has three; both have the tied embedding."""
    for stage, names in (found["read"] for found in specials):
        layers = {int(name.split(".")[2]) for name in names if ".layers." in name}
        assert layers == ({3, 4} if stage else {0, 1, 2})
        rest = {name for name in names if ".layers." not in name}
        assert rest == {EMBEDDING} | ({"model.norm.weight"} if stage else set())


TENSOR, EXPERT, PIPELINE = (f"fsdp_config.{n}_parallel_size" for n in ("tensor", "expert", "pipeline"))
REFUSED = {
    2: {
        **{"layers lent": (TENSOR, 2), "stages lent": (PIPELINE, 2), "output": (None, ["values"])},
        **{"layers by 3": (TENSOR, "3 of 2 ranks"), "stages by 3": (PIPELINE, "3 of 2 ranks")},
        **{"experts lent": (EXPERT, 2), "experts by 3": (EXPERT, "3 of 2 ranks")},
        "no experts": (EXPERT, "2, model_type qwen2"),
        "other experts": (EXPERT, "2, model_type llama4_text"),
        "offload": ("model.enable_activation_offload", f"true with {PIPELINE}=2"),
    },
    4: {
        "layers by 4": (TENSOR, "4, num_key_value_heads=2"),
        "stages by 4": (PIPELINE, "4, num_hidden_layers=2"),
        "experts by 4": (EXPERT, "4, num_experts=6"),
    },
}


def refusals(models):
    def lend(division, **keys):
        with engine_of(models, DIVISIONS[division], frozen=True, **keys).unsharded():
            pass

    def make(division, size, **keys):
        engine = engine_of(models, {"fsdp": {f"{division}_parallel_size": size}}, **keys)
        engine.forward(matrix.batch_for({}), outputs=frozenset({"values"}), micro=synthetic.CUTS["one"])

    attempts = {
        "layers lent": lambda: lend("layers"),
        "stages lent": lambda: lend("stages"),
        "experts lent": lambda: lend("experts", of="gpt_oss"),
        "no experts": lambda: make("expert", 2),
        "other experts": lambda: make("expert", 2, of="llama4"),
        "output": lambda: make("pipeline", 2),
        "offload": lambda: make("pipeline", 2, model=matrix.OFFLOADED),
        **{f"layers by {size}": lambda size=size: make("tensor", size) for size in (3, 4)},
        **{f"experts by {size}": lambda size=size: make("expert", size, of="mixtral") for size in (3, 4)},
        **{f"stages by {size}": lambda size=size: make("pipeline", size) for size in (3, 4)},
    }
    said = {}
    for name in REFUSED[dist.get_world_size()]:
        try:
            attempts[name]()
        except TandemError as error:
            said[name] = error.field, error.got
    return said


def test_what_cannot_be_done_is_refused_on_all_ranks(specials):
    assert [found["refused"] for found in specials] == [REFUSED[len(specials)]] * len(specials)


def test_heads_that_do_not_divide_are_refused(models):
    with pytest.raises(ModelError, match="3 devices, 4 heads") as refused:
        SequenceSplit(0, 3, None, CollectiveMeter()).check(AutoConfig.from_pretrained(models / "qwen2"))
    assert refused.value.field == "ulysses_sequence_parallel_size"


class BrokenLoss(synthetic.SyntheticLoss):
    def __call__(self, out, columns, offsets, counts):
        raise DataError("the loss does not like it")


def broken_stage(models):
    """Return the error of a step whose loss fails on the last stage, and the seconds until then."""
    engine, began = engine_of(models, DIVISIONS["stages"]), time.monotonic()
    try:
        engine.train_step(matrix.batch_for({}), BrokenLoss(), micro=synthetic.CUTS["three"])
    except (DataError, RuntimeError) as error:
        met = type(error).__name__, time.monotonic() - began
    if dist.get_rank() == 1:
        time.sleep(15)  # stay alive, so that no closed connection tells the other rank of the error
    return met


@pytest.mark.slow
def test_a_stage_that_fails_ends_the_others_in_limited_time(models):
    (first, waited), (last, _) = on_ranks(broken_stage, models, collective_s=6, together=False)
    assert last == "DataError" and first != "DataError" and waited < 60
