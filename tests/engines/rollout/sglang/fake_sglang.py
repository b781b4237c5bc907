"""A fake of SGLang 0.5.23's server with a real, small model, checked against the real server's behaviour."""

import base64
import hashlib
import pickle
import threading
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import distributed

from tandem.engines.rollout.http.channel import Group, own_address
from tandem.protocol import SamplingParams
from tests.engines.rollout.http.fakes import FakeServer, Reply
from tests.engines.rollout.sglang.semantics import sglang_distribution

_OURS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_SAMPLING = """max_new_tokens stop stop_token_ids temperature top_p top_k min_p frequency_penalty
    presence_penalty repetition_penalty min_new_tokens ignore_eos stream_interval logit_bias sampling_seed"""
_FIELDS = "rid input_ids sampling_params return_logprob return_sampling_mask stream"
_JOINED = {"qkv_proj": "qkv", "gate_up_proj": ("gate", "up")}


def joined(tensors):
    """Yield weights as the server holds them, with joined projections and a padded vocabulary."""
    for name, tensor in tensors.items():
        for whole, parts in _JOINED.items():
            names = [name.replace(f"{parts[0]}_proj", f"{part}_proj") for part in parts]
            if f".{parts[0]}_proj." in name:
                fused = name.replace(f"{parts[0]}_proj", whole)
                yield fused, torch.cat([tensors[part] for part in names])
                break
            if any(f".{part}_proj." in name for part in parts):
                break
        else:
            more = -len(tensor) % 64 if name.endswith(("embed_tokens.weight", "lm_head.weight")) else 0
            yield name, torch.nn.functional.pad(tensor, (0, 0, 0, more)) if more else tensor


class FakeSGLang(FakeServer):
    """A fake SGLang server.

    `cumulative` is whether each event repeats the earlier ones (the server's default), `eos` the model's own
    end tokens, `memory` the tags whose memory is allocated, `damage` a change to the weights it holds, and
    `refusal` the reason to refuse new weights.
    """

    generates = "/generate"
    cumulative, refusal, mask_limit = True, None, 4096
    damage = staticmethod(lambda name, tensor: tensor)

    def __init__(self, module, *, eos=(), **options):
        self.module, self.eos = module, eos
        self.memory, self.version = {"weights", "kv_cache"}, "default"
        self.session, self.groups = False, {}
        self._paused, self._forward = threading.Event(), threading.Lock()
        super().__init__(self._write, **options)

    def _write(self, prompt, params):
        names = SamplingParams.__dataclass_fields__
        asked = {_OURS.get(name, name): value for name, value in params.items()}
        asked["logit_bias"] = tuple((int(t), b) for t, b in asked.get("logit_bias", {}).items())
        sampling = SamplingParams(**{name: value for name, value in asked.items() if name in names})
        rng, written = np.random.default_rng(sampling.seed), []
        while True:
            while self._paused.is_set():
                self._closing.wait(0.005)
            with self._forward, torch.no_grad():
                logits = self.module(torch.tensor([[*prompt, *written]])).logits[0, -1].double().numpy()
            edited, p, _ = sglang_distribution(logits, sampling, prompt, written)
            token = int(p.argmax()) if sampling.greedy else int(rng.choice(len(p), p=p / p.sum()))
            edited = edited - edited.max()
            yield token, float(np.log(p[token])), float(edited[token] - np.log(np.exp(edited).sum()))
            written.append(token)

    def answer(self, path, body, fault):
        if path == "/generate":
            known = body.keys() <= set(_FIELDS.split())
            assert known and body["sampling_params"].keys() <= set(_SAMPLING.split()), body
            assert self.memory == {"weights", "kv_cache"}
            top_k = body["sampling_params"].get("top_k", 1 << 30)
            if body["return_sampling_mask"] and top_k > self.mask_limit:
                return Reply({"error": {"message": "return_sampling_mask requires top_k=1 …"}}, 400)
            return Reply(events=self._events(body))
        control = getattr(self, f"_{path.strip('/')}", None)
        return control(body or {}) if control else Reply({"detail": "Not Found"}, 404)

    def _events(self, body):
        params = dict(body["sampling_params"])
        ends = set(params.get("stop_token_ids", ())) | set(self.eos)
        params["stop_token_ids"] = [] if params["ignore_eos"] else sorted(ends)
        params["max_tokens"], interval = params["max_new_tokens"], params["stream_interval"]
        entries, spans = [], []
        for written, reason in self.tokens(body["input_ids"], params):
            if not spans or spans[-1]["version"] != self.version:
                spans.append({"version": self.version, "start": len(entries)})
            entries.append(written)
            spans[-1]["end"] = len(entries)
            if reason is None and len(entries) % interval:
                continue
            shown = entries if self.cumulative else entries[-(len(entries) % interval or 16) :]
            about = {
                "id": body["rid"],
                "finish_reason": reason and {"type": reason},
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": len(entries),
                "output_token_logprobs": [[plain, token, None] for token, _, plain in shown],
            }
            if body["return_sampling_mask"]:
                about["output_token_sampling_logprobs"] = [drawn for _, drawn, _ in shown]
            if reason is not None:
                about["weight_versions"] = spans
            yield {"text": "", "output_ids": [token for token, _, _ in shown], "meta_info": about}

    def _model_info(self, _):
        return Reply({"model_path": "tiny", "is_generation": True, "weight_version": self.version})

    def _server_info(self, _):
        facts = {"tp_size": 1, "device": "cpu", "dtype": "float32"}
        return Reply(facts | {"sampling_mask_max_tokens": self.mask_limit})

    def _changed(self, tensors=(), **body):
        """Load weights and answer, unless the server refuses."""
        assert "weights" in self.memory
        if self.refusal is not None:
            return Reply({"success": False, "message": self.refusal}, 400)
        self.module.load_state_dict(dict(tensors), strict=False)
        self.version = body.get("weight_version") or self.version
        return Reply({"success": True, "message": "Succeeded."})

    def _update_weights_from_disk(self, body):
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        return self._changed(item for file in files for item in load_file(file).items())

    def _begin_weight_update(self, _):
        opened, self.session = not self.session, True
        return Reply({"success": opened, "message": "a session is open"}, 200 if opened else 400)

    def _end_weight_update(self, _):
        closed, self.session = self.session, False
        return Reply({"success": closed, "message": "no session is open"}, 200 if closed else 400)

    def _update_weights_from_tensor(self, body):
        if not self.session:
            return Reply({"success": False, "message": "no session is open"}, 400)
        (handle,) = body["serialized_named_tensors"]
        return self._changed(pickle.loads(base64.b64decode(handle)))

    def _init_weights_update_group(self, body):
        name, address, port = body["group_name"], body["master_address"], body["master_port"]
        store = distributed.TCPStore(address, port, body["world_size"], is_master=False)
        for prefix in (name, f"{name}/", "cpu/"):
            store = distributed.PrefixStore(prefix, store)
        own = own_address(address, port)
        self.groups[name] = Group(store, body["rank_offset"], body["world_size"], body["backend"], own)
        return Reply({"success": True, "message": ""})

    def _update_weights_from_distributed(self, body):
        received = []
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            received.append((name, torch.empty(shape, dtype=getattr(torch, dtype))))
            self.groups[body["group_name"]].broadcast(received[-1][1]).wait()
        return self._changed(received)

    def _update_weight_version(self, body):
        assert body["abort_all_requests"] is False
        self.version = body["new_version"]
        return Reply({"success": True, "message": ""})

    def _weights_checker(self, body):
        assert body == {"action": "checksum"}
        held = {name: value.detach() for name, value in self.module.named_parameters()}
        sums = {}
        for name, tensor in joined(held):
            content = self.damage(name, tensor).contiguous().numpy().tobytes()
            sums[name] = hashlib.sha256(content).hexdigest()[:16]
        place = [{"role": "target", "tp_rank": 0, "tp_size": 1}]
        rank = {"checksums": sums, "per_gpu_checksum": "", "parallelism_info": place}
        return Reply({"success": True, "message": "", "ranks": [rank]})

    def _pause_generation(self, body):
        assert body == {"mode": "retract"}
        self._paused.set()
        return Reply({"status": "ok"})

    def _continue_generation(self, _):
        self._paused.clear()
        return Reply({"status": "ok"})

    def _release_memory_occupation(self, body):
        self.memory -= set(body["tags"])
        return Reply()

    def _resume_memory_occupation(self, body):
        self.memory |= set(body["tags"])
        return Reply()

    def _abort_request(self, _):
        return Reply()
