"""An export contains all files of the model's folder besides the weights."""

import json

import pytest
import yaml
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tandem.checkpoint import CheckpointManager
from tandem.offline.export import export_checkpoint
from tests.support.tiny import TEMPLATE, make_model, make_tokenizer

OTHER = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
CODE = """
from transformers import Qwen2Config, Qwen2ForCausalLM
class MineConfig(Qwen2Config):
    model_type = "mine"
class MineForCausalLM(Qwen2ForCausalLM):
    config_class = MineConfig
"""
OF_CODE = {"AutoConfig": "modeling_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
NAMED = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": OTHER}]
NO_TEMPLATE = {"chat_template.jinja": None}
PROCESSORS = ("preprocessor_config", "processor_config", "video_preprocessor_config")
UNKNOWN = {"of_nobody": {"a": [1, None]}, "attention_dropout": 0.1, "torch_dtype": "float32"}
END = {"eos_token_id": [7], "top_p": 0.8, "unheard_of": 3}
KINDS = {
    "generation": {"generation_config.json": END | {"eos_token_id": [1, 7, 9], "do_sample": True}},
    "template in a field": NO_TEMPLATE | {"tokenizer_config.json": {"chat_template": TEMPLATE}},
    "templates in a field": NO_TEMPLATE | {"tokenizer_config.json": {"chat_template": NAMED}},
    "templates in files": {"additional_chat_templates/tool_use.jinja": OTHER},
    "no template": NO_TEMPLATE,
    "special tokens": {
        "special_tokens_map.json": {"eos_token": "<eos>", "additional_special_tokens": ["<unk>"]},
        "added_tokens.json": {"<unk>": 2},
        "tokenizer_config.json": {"model_max_length": 77, "pad_token": None, "of_nobody": {"a": [1]}},
    },
    "processor": {
        **{f"{name}.json": {"image_mean": [0.5], "name": name} for name in PROCESSORS},
        "chat_template.json": {"chat_template": OTHER},
    },
    "unknown fields": {"config.json": UNKNOWN},
    "generation in the config": {
        "generation_config.json": None,
        "config.json": {"top_k": 7, "temperature": 0.5, "eos_token_id": [1, 8]},
    },
    "other files": {
        "LICENSE": "Permission is granted",
        "README.md": "---\nlicense: apache-2.0\n---\n",
        "custom_generate/generate.py": "def generate(model): ...\n",
    },
    "own code": {
        "modeling_mine.py": CODE,
        "config.json": {"model_type": "mine", "architectures": ["MineForCausalLM"], "auto_map": OF_CODE},
    },
}
"""Changes of a model's folder: fields of JSON files, files with a text, and files that go."""


def change(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if content is None:
            path.unlink()
        elif isinstance(content, str):
            path.write_text(content)
        else:
            stored = json.loads(path.read_text()) if path.is_file() else {}
            path.write_text(json.dumps(stored | content))
    return folder


def make_run(folder, path, **model):
    """Create a run with one checkpoint, which has the weights of its model's folder."""
    code = model.get("trust_remote_code", False)
    policy = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=code)
    state = {"model": {name: value.detach() for name, value in policy.named_parameters()}}
    model = {"path": str(path), "tokenizer_path": str(path)} | model
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": model, "trainer": {"keep_best": None}}))
    manager = CheckpointManager(folder / "checkpoints")
    manager.save(1, {"actor": lambda path: save_shards(state, checkpoint_id=path, no_dist=True)}, {})
    return folder


def files(folder):
    """Return all files except the weights and the config."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".safetensors" and path.name != "config.json"
    }


def seen(folder, *, code=False):
    """Return what transformers reads from a folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=code)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=code)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=code).to_dict()
    return {
        "config": {name: value for name, value in config.items() if name not in ("dtype", "_name_or_path")},
        "generation": {k: v for k, v in model.generation_config.to_dict().items() if k[0] != "_"},
        "template": tokenizer.chat_template,
        "special": [getattr(tokenizer, f"{name}_token") for name in ("bos", "eos", "pad", "unk")],
        "tokens": tokenizer.get_vocab(),
        "ids": tokenizer("12+3")["input_ids"],
    }


@pytest.fixture
def export(tmp_path):
    """Return a function that exports a run of the model in `model`."""
    run, out = tmp_path / "run", tmp_path / "out"
    return lambda model, **keys: export_checkpoint(make_run(run, model, **keys), out)


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_and_every_field(tmp_path, monkeypatch, export, kind):
    model = change(make_model(tmp_path / "model"), KINDS[kind])
    wanted, code = files(model), kind == "own code"
    # Files of weights and of the optimizer must not be copied.
    change(model, {"pytorch_model.bin.index.json": {}, "optimizer.pt": "1"})
    if code:
        monkeypatch.setenv("TANDEM_TRUST", str(tmp_path / "run"))
    out = export(model, trust_remote_code=code)
    assert files(out) == wanted
    stored, written = (json.loads((path / "config.json").read_text()) for path in (model, out))
    stored.pop("torch_dtype", None)
    assert written == stored | {"dtype": "float32"}
    assert seen(out, code=code) == seen(model, code=code)


def test_a_tokenizer_elsewhere_brings_its_files_alone(tmp_path, export):
    model, other = change(make_model(tmp_path / "model"), KINDS["generation"]), tmp_path / "tokenizer"
    make_tokenizer(other, chat_template=OTHER)
    change(other, KINDS["templates in files"])
    change(other, {"generation_config.json": {"eos_token_id": 2}, "config.json": {"model_type": "llama"}})
    out = export(model, tokenizer_path=str(other))
    assert AutoTokenizer.from_pretrained(out).chat_template == {"default": OTHER, "tool_use": OTHER}
    assert GenerationConfig.from_pretrained(out).eos_token_id == [1, 7, 9]
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen2"
    assert set(files(out)) == set(files(model)) | set(files(other))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "template" in kind or kind == "processor"])
def test_the_template_of_the_config_is_the_only_one(tmp_path, export, kind):
    model = change(make_model(tmp_path / "model"), KINDS[kind])
    out = export(model, custom_chat_template="{# mine #}")
    assert AutoTokenizer.from_pretrained(out).chat_template == "{# mine #}"
    assert not any(TEMPLATE.encode() in text or OTHER.encode() in text for text in files(out).values())
    stored = json.loads((model / "tokenizer_config.json").read_text())
    stored.pop("chat_template", None)
    assert json.loads((out / "tokenizer_config.json").read_text()) == stored


def test_links_and_folders_of_others(tmp_path):
    stored, model = change(make_model(tmp_path / "stored"), KINDS["generation"]), tmp_path / "model"
    (model / ".cache").mkdir(parents=True)
    for path in stored.iterdir():
        (model / path.name).symlink_to(path)
    (model / ".cache" / "some.json").write_text("{}")
    out = export_checkpoint(make_run(model / "run", model), model / "out")
    assert files(out) == files(stored)
    assert not any(path.is_symlink() for path in out.iterdir())


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({"generation_config.json": END}, 7),
        ({"generation_config.json": None, "config.json": {"top_k": 7}}, 8),
    ],
)
def test_transformers_stops_where_the_run_did(tmp_path, export, changes, end):
    model = change(make_model(tmp_path / "model", eos_token_id=8), changes)
    out = export(model, custom_chat_template="{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}")
    assert seen(out)["generation"] == seen(model)["generation"] | {"eos_token_id": [end, 1]}
