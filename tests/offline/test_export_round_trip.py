"""An export contains all files of the model's folder besides the weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import tandem
from tandem.checkpoint import CheckpointManager
from tandem.cli.main import main
from tandem.offline.export import export_checkpoint
from tests.support.runs import Lab, lab
from tests.support.tiny import TEMPLATE, make_model, make_tokenizer

__all__ = ["lab"]

OTHER = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
CODE = """
from transformers import Qwen2Config, Qwen2ForCausalLM
class MineConfig(Qwen2Config):
    model_type = "mine"
class MineForCausalLM(Qwen2ForCausalLM):
    config_class = MineConfig
"""


def change(folder: Path, name: str, /, **fields: Any) -> None:
    path = folder / name
    stored = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(stored | fields))


def no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def generation(folder: Path) -> None:
    change(folder, "generation_config.json", eos_token_id=[1, 7, 9], top_p=0.8, unheard_of=3, do_sample=True)


def template_in_a_field(folder: Path) -> None:
    no_template(folder)
    change(folder, "tokenizer_config.json", chat_template=TEMPLATE)


def templates_in_a_field(folder: Path) -> None:
    no_template(folder)
    both = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": OTHER}]
    change(folder, "tokenizer_config.json", chat_template=both)


def templates_in_files(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(OTHER)


def no_chat_template(folder: Path) -> None:
    no_template(folder)


def special_tokens(folder: Path) -> None:
    change(folder, "special_tokens_map.json", eos_token="<eos>", additional_special_tokens=["<unk>"])
    change(folder, "added_tokens.json", **{"<unk>": 2})
    change(folder, "tokenizer_config.json", model_max_length=77, pad_token=None, of_nobody={"a": [1]})


def processor(folder: Path) -> None:
    for name in ("preprocessor_config", "processor_config", "video_preprocessor_config"):
        change(folder, f"{name}.json", image_mean=[0.5], name=name)
    change(folder, "chat_template.json", chat_template=OTHER)


def unknown_fields(folder: Path) -> None:
    change(folder, "config.json", of_nobody={"a": [1, None]}, attention_dropout=0.1, torch_dtype="float32")


def generation_in_the_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    change(folder, "config.json", top_k=7, temperature=0.5, eos_token_id=[1, 8])


def other_files(folder: Path) -> None:
    (folder / "LICENSE").write_text("Permission is granted")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text("def generate(model): ...\n")


def own_code(folder: Path) -> None:
    (folder / "modeling_mine.py").write_text(CODE)
    auto_map = {
        "AutoConfig": "modeling_mine.MineConfig",
        "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
    }
    change(folder, "config.json", model_type="mine", architectures=["MineForCausalLM"], auto_map=auto_map)


KINDS: tuple[Callable[[Path], None], ...] = (
    *(generation, template_in_a_field, templates_in_a_field, templates_in_files, no_chat_template),
    *(special_tokens, processor, unknown_fields, generation_in_the_config, other_files, own_code),
)


def make_run(folder: Path, **model: Any) -> Path:
    """Create a run with one checkpoint, which has the weights of its model's folder."""
    policy = AutoModelForCausalLM.from_pretrained(
        model["path"], trust_remote_code=model.get("trust_remote_code", False)
    )
    state = {"model": {name: value.detach() for name, value in policy.named_parameters()}}
    model = {"tokenizer_path": model["path"]} | model
    folder.mkdir()
    tree = {
        "model": {name: str(value) if isinstance(value, Path) else value for name, value in model.items()}
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree | {"trainer": {"keep_best": None}}))
    manager = CheckpointManager(folder / "checkpoints")
    manager.save(1, {"actor": lambda path: save_shards(state, checkpoint_id=path, no_dist=True)}, {})
    return folder


def files(folder: Path) -> dict[str, bytes]:
    """Return all files except the weights and the config."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".safetensors" and path.name != "config.json"
    }


def seen(folder: Path, *, code: bool = False) -> dict[str, Any]:
    """Return what transformers reads from a folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=code)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=code)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=code).to_dict()
    special = {name: getattr(tokenizer, f"{name}_token") for name in ("bos", "eos", "pad", "unk")}
    return {
        "config": {name: value for name, value in config.items() if name not in ("dtype", "_name_or_path")},
        "generation": {k: v for k, v in model.generation_config.to_dict().items() if k[0] != "_"},
        "template": tokenizer.chat_template,
        "special": special,
        "tokens": tokenizer.get_vocab(),
        "ids": tokenizer("12+3")["input_ids"],
    }


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_file_and_every_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    model = make_model(tmp_path / "model", kind="qwen2")
    kind(model)
    wanted = files(model)
    (model / "pytorch_model.bin.index.json").write_text("{}")  # an index of weights, which must not be copied
    (model / "optimizer.pt").write_bytes(b"1")
    code = kind is own_code
    run = make_run(tmp_path / "run", path=model, trust_remote_code=code)
    if code:
        monkeypatch.setenv("TANDEM_TRUST", str(run))
    out = export_checkpoint(run, tmp_path / "out")
    assert files(out) == wanted
    stored, written = (json.loads((path / "config.json").read_text()) for path in (model, out))
    stored.pop("torch_dtype", None)
    assert written == stored | {"dtype": "float32"}
    assert seen(out, code=code) == seen(model, code=code)


def test_a_tokenizer_elsewhere_brings_its_files_alone(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    generation(model)
    other = tmp_path / "tokenizer"
    make_tokenizer(other, chat_template=OTHER)
    templates_in_files(other)
    change(other, "generation_config.json", eos_token_id=2)
    change(other, "config.json", model_type="llama")
    out = export_checkpoint(make_run(tmp_path / "run", path=model, tokenizer_path=other), tmp_path / "out")
    templates = {"default": OTHER, "tool_use": OTHER}
    assert AutoTokenizer.from_pretrained(out).chat_template == templates
    assert GenerationConfig.from_pretrained(out).eos_token_id == [1, 7, 9]
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen2"
    assert set(files(out)) == set(files(model)) | set(files(other))


@pytest.mark.parametrize(
    "kind", [template_in_a_field, templates_in_a_field, templates_in_files, processor, no_chat_template]
)
def test_the_template_of_the_config_is_the_only_one(tmp_path: Path, kind: Any) -> None:
    model = make_model(tmp_path / "model")
    kind(model)
    out = export_checkpoint(
        make_run(tmp_path / "run", path=model, custom_chat_template="{# mine #}"), tmp_path / "out"
    )
    assert AutoTokenizer.from_pretrained(out).chat_template == "{# mine #}"
    assert not any(TEMPLATE.encode() in text or OTHER.encode() in text for text in files(out).values())
    stored = json.loads((model / "tokenizer_config.json").read_text())
    stored.pop("chat_template", None)
    assert json.loads((out / "tokenizer_config.json").read_text()) == stored


def test_links_and_folders_of_others(tmp_path: Path) -> None:
    """Links to files, as in a hub's cache, are copied; folders with other content are not."""
    stored = make_model(tmp_path / "stored")
    generation(stored)
    model = tmp_path / "model"
    model.mkdir()
    for path in stored.iterdir():
        (model / path.name).symlink_to(path)
    (model / ".cache").mkdir()
    (model / ".cache" / "some.json").write_text("{}")
    run = make_run(model / "run", path=model)
    out = export_checkpoint(run, model / "out")
    assert files(out) == files(stored)
    assert not any(path.is_symlink() for path in out.iterdir())


@pytest.mark.parametrize("generation_file", [True, False])
def test_transformers_stops_where_the_run_did(tmp_path: Path, generation_file: bool) -> None:
    """End tokens of tokenizer and template are added if generation_config.json lacks them."""
    model = make_model(tmp_path / "model", eos_token_id=8)
    if generation_file:
        change(model, "generation_config.json", eos_token_id=[7], top_p=0.8, unheard_of=3)
    else:
        (model / "generation_config.json").unlink()
        change(model, "config.json", top_k=7)
    chat = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"
    out = export_checkpoint(
        make_run(tmp_path / "run", path=model, custom_chat_template=chat), tmp_path / "out"
    )
    before, after = (seen(folder)["generation"] for folder in (model, out))
    assert after == before | {"eos_token_id": [7 if generation_file else 8, 1]}


def test_the_best_checkpoint_from_python_and_from_a_shell(lab: Lab, tmp_path: Path) -> None:
    generation(lab.model)
    templates_in_files(lab.model)
    words = ("trainer.save_freq=1", "trainer.keep_best=actor/entropy", "trainer.keep_best_mode=max")
    run = lab.run("best", *words)
    tandem.open(run.folder).export(tmp_path / "python", best=True)
    assert main(["export", str(run.folder), str(tmp_path / "shell"), "--best"]) == 0
    assert files(tmp_path / "python") == files(tmp_path / "shell") == files(lab.model)
