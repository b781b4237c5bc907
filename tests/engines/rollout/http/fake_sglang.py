"""A fake of SGLang 0.5.23's server with a real, small model: `/generate`, and new weights from a folder."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from tandem.protocol import SamplingParams
from tests.contract.reference import distribution
from tests.engines.rollout.http.fakes import FakeServer, Reply, Written

_OURS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_SAMPLING = """max_new_tokens stop stop_token_ids temperature top_p top_k min_p frequency_penalty
    presence_penalty repetition_penalty min_new_tokens ignore_eos stream_interval logit_bias sampling_seed"""
_FIELDS = "rid input_ids sampling_params return_logprob return_sampling_mask stream"


class FakeSGLang(FakeServer):
    """A fake whose `memory` is what is allocated, and which returns weights as `held` makes them."""

    generates = "/generate"
    cumulative = True  # each event repeats the earlier ones, the server's default
    shows = True  # the model supports get_weights_by_name
    held: Callable[[str, torch.Tensor], torch.Tensor] = staticmethod(lambda name, tensor: tensor)
    refusal: str | None = None  # the reason to refuse new weights

    def __init__(self, module: PreTrainedModel, **options: Any) -> None:
        self.module = module
        self.memory = {"weights", "kv_cache"}
        self.version = "default"
        self._paused = threading.Event()
        self._forward = threading.Lock()
        super().__init__(self._write, **options)

    def _write(self, prompt: Sequence[int], params: dict[str, Any]) -> Iterator[Written]:
        names = SamplingParams.__dataclass_fields__
        asked = {_OURS.get(name, name): value for name, value in params.items()}
        asked["logit_bias"] = tuple((int(t), b) for t, b in asked.get("logit_bias", {}).items())
        sampling = SamplingParams(**{name: value for name, value in asked.items() if name in names})
        rng, written = np.random.default_rng(sampling.seed), list[int]()
        while True:
            while self._paused.is_set():
                self._closing.wait(0.005)
            with self._forward, torch.no_grad():
                logits = self.module(torch.tensor([[*prompt, *written]])).logits[0, -1].double().numpy()
            edited, p, _ = distribution(logits, sampling, prompt, written)
            token = int(p.argmax()) if sampling.greedy else int(rng.choice(len(p), p=p / p.sum()))
            edited = edited - edited.max()
            yield token, float(np.log(p[token])), float(edited[token] - np.log(np.exp(edited).sum()))
            written.append(token)

    def answer(self, path: str, body: Any, fault: str) -> Reply:
        if path == "/generate":
            known = body.keys() <= set(_FIELDS.split())
            assert known and body["sampling_params"].keys() <= set(_SAMPLING.split()), body
            assert self.memory == {"weights", "kv_cache"}
            return Reply(events=self._events(body))
        control = getattr(self, f"_{path.strip('/')}", None)
        return control(body) if control else Reply({"detail": "Not Found"}, 404)

    def _events(self, body: Any) -> Iterator[Any]:
        params = {"stop_token_ids": [], **body["sampling_params"]}
        params["max_tokens"], interval = params["max_new_tokens"], params["stream_interval"]
        entries, spans = list[Written](), list[dict[str, Any]]()
        for written, reason in self.tokens(body["input_ids"], params):
            if not spans or spans[-1]["version"] != self.version:
                spans.append({"version": self.version, "start": len(entries)})
            entries.append(written)
            spans[-1]["end"] = len(entries)
            if reason is None and len(entries) % interval:
                continue
            shown = entries if self.cumulative else entries[-(len(entries) % interval or 16) :]
            about: dict[str, Any] = {"id": body["rid"], "finish_reason": reason and {"type": reason}}
            about |= {"prompt_tokens": len(body["input_ids"]), "completion_tokens": len(entries)}
            about["output_token_logprobs"] = [[plain, token, None] for token, _, plain in shown]
            if body["return_sampling_mask"]:
                about["output_token_sampling_logprobs"] = [drawn for _, drawn, _ in shown]
            if reason is not None:
                about["weight_versions"] = spans
            yield {"text": "", "output_ids": [token for token, _, _ in shown], "meta_info": about}

    def _model_info(self, _: Any) -> Reply:
        return Reply({"model_path": "tiny", "is_generation": True, "weight_version": self.version})

    def _update_weights_from_disk(self, body: Any) -> Reply:
        assert "weights" in self.memory
        if self.refusal is not None:
            return Reply({"success": False, "message": self.refusal, "num_paused_requests": 0}, 400)
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        state = {name: value for file in files for name, value in load_file(file).items()}
        self.module.load_state_dict(state, strict=False)
        self.version = body["weight_version"]
        return Reply({"success": True, "message": "Succeeded.", "num_paused_requests": 0})

    def _get_weights_by_name(self, body: Any) -> Reply:
        if not self.shows:
            return Reply({"error": {"message": "Get parameter by name failed"}}, 400)
        tensor = self.held(body["name"], dict(self.module.named_parameters())[body["name"]].detach())
        return Reply(tensor.float().tolist()[: body["truncate_size"]])

    def _pause_generation(self, body: Any) -> Reply:
        assert body == {"mode": "retract"}
        self._paused.set()
        return Reply({"status": "ok"})

    def _continue_generation(self, _: Any) -> Reply:
        self._paused.clear()
        return Reply({"status": "ok"})

    def _release_memory_occupation(self, body: Any) -> Reply:
        self.memory -= set(body["tags"])
        return Reply()

    def _resume_memory_occupation(self, body: Any) -> Reply:
        self.memory |= set(body["tags"])
        return Reply()

    def _abort_request(self, _: Any) -> Reply:
        return Reply()
