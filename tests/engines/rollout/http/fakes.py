"""Fake servers on this machine that implement the documented wire formats strictly.

They break off when a request has a field that the real server does not know. Run as a program, this file is
an OpenAI-compatible server that can be killed.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VOCABULARY = 97
Written = tuple[int, float, float]
"""A token and its log-probs under the distribution sampled from, and under softmax(logits / temperature)."""
Writer = Callable[[Sequence[int], dict[str, Any]], Iterator[Written]]
"""Takes (prompt, sampling parameters by OpenAI's names) and yields the next tokens without end."""


def scripted(prompt: Sequence[int], params: dict[str, Any]) -> Iterator[Written]:
    """Yield tokens that follow from prompt and seed, with log-probs that encode their position."""
    first = sum(prompt) + 31 * (params["seed"] % 1009)
    for at in range(10_000):
        yield (first + 7 * at) % VOCABULARY, -0.5 - at / 64, -1.5 - at / 64


@dataclass(frozen=True)
class Reply:
    """A status with JSON, or a stream of events."""

    body: Any = None
    status: int = 200
    events: Iterator[Any] | None = None


class FakeServer(ABC):
    """A server in a thread of this process. A subclass answers the requests.

    `faults` are what goes wrong with the next requests for a response, one entry each; "" is nothing.
    `cut_off` has the paths of answers whose reader disconnected, and `most` is the most answered at a time.
    """

    generates: str

    def __init__(self, writer: Writer = scripted, *, pause_s: float = 0.0, decode: Any = None) -> None:
        self.writer, self.pause_s, self.decode = writer, pause_s, decode
        self.seen: list[tuple[str, Any]] = []
        self.faults: deque[str] = deque()
        self.cut_off: list[str] = []
        self.most = self._now = 0
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._http = _Quiet(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": self}))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closing.set()
        self._http.shutdown()
        self._http.server_close()

    def bodies(self, path: str = "") -> list[Any]:
        """Return the bodies of requests for this path, by default those for a response."""
        return [body for at, body in self.seen if at == (path or self.generates)]

    @abstractmethod
    def answer(self, path: str, body: Any, fault: str) -> Reply: ...

    def respond(self, path: str, body: Any, handler: _Handler) -> None:
        with self._lock:
            self.seen.append((path, body))
            fault = self.faults.popleft() if path == self.generates and self.faults else ""
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            if fault == "hang":
                self._closing.wait(60)
            elif fault == "hang up":
                handler.hang_up()
            elif fault.isdigit():
                handler.send_json({"error": f"{fault} as planned"}, int(fault))
            else:
                self._send(self.answer(path, body, fault), fault, handler)
        except (BrokenPipeError, ConnectionResetError):
            self.cut_off.append(path)
        finally:
            with self._lock:
                self._now -= 1

    def _send(self, reply: Reply, fault: str, handler: _Handler) -> None:
        if reply.events is None:
            handler.send_json(reply.body, reply.status)
            return
        handler.start_stream()
        for number, event in enumerate(reply.events):
            if fault == "drop" and number == 1:
                handler.hang_up()
                return
            if fault == "short" and number == 1:
                break
            handler.send_chunk("data: {oops" if fault == "garbage" else f"data: {json.dumps(event)}")
        handler.send_chunk("data: [DONE]")
        handler.send_chunk(None)

    def tokens(self, prompt: Sequence[int], params: dict[str, Any]) -> Iterator[tuple[Written, str | None]]:
        """Yield what is generated. The last token comes with its finish reason."""
        so_far: list[int] = []
        for at, written in enumerate(self.writer(prompt, params)):
            if self.pause_s and self._closing.wait(self.pause_s):
                return
            so_far.append(written[0])
            text = self.decode(so_far) if self.decode and params.get("stop") else ""
            stopped = written[0] in params["stop_token_ids"] or any(s in text for s in params.get("stop", ()))
            reason = "stop" if stopped else "length" if at + 1 == params["max_tokens"] else None
            yield written, reason
            if reason:
                return


class _Quiet(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.fake.respond(self.path, None, self)

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.fake.respond(self.path, json.loads(raw) if raw else None, self)

    def log_message(self, *_: object) -> None:
        pass

    def _begin(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def send_json(self, body: Any, status: int) -> None:
        raw = json.dumps(body).encode()
        self._begin(status, Content_Type="application/json", Content_Length=str(len(raw)))
        self.wfile.write(raw)

    def start_stream(self) -> None:
        self._begin(200, Content_Type="text/event-stream", Transfer_Encoding="chunked")

    def send_chunk(self, text: str | None) -> None:
        raw = b"" if text is None else f"{text}\n\n".encode()
        self.wfile.write(f"{len(raw):x}\r\n".encode() + raw + b"\r\n")
        self.wfile.flush()

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


_FIELDS = """model prompt max_tokens temperature top_p top_k min_p seed stop stream logprobs presence_penalty
    frequency_penalty repetition_penalty logit_bias stop_token_ids ignore_eos min_tokens stream_interval
    request_id return_token_ids"""
_TGI_PARAMETERS = {
    **dict.fromkeys(
        ("details", "decoder_input_details", "do_sample", "return_full_text"), (bool, None, None)
    ),
    **dict.fromkeys(("temperature", "repetition_penalty"), (float, 0, float("inf"))),
    **dict.fromkeys(("max_new_tokens", "top_k", "seed"), (int, 0, 1 << 64)),
    **{"top_p": (float, 0, 1), "stop": (list, None, None)},
}
"""The parameters of TGI's published interface that Tandem sends: type, and excluded bounds."""


class FakeOpenAI(FakeServer):
    """A fake of vLLM's /v1/completions. `mode` is its --logprobs-mode; its schema may be `published`."""

    generates = "/v1/completions"
    mode = "processed_logprobs"
    published = True
    models: tuple[str, ...] = ("tiny",)

    def answer(self, path: str, body: Any, fault: str) -> Reply:
        if path == "/v1/models":
            return Reply({"data": [{"id": name} for name in self.models]})
        if path == "/openapi.json" and self.published:
            ref = {"schema": {"$ref": "#/components/schemas/CompletionRequest"}}
            post = {"requestBody": {"content": {"application/json": ref}}}
            schemas = {"CompletionRequest": {"properties": {name: {} for name in _FIELDS.split()}}}
            return Reply({"paths": {self.generates: {"post": post}}, "components": {"schemas": schemas}})
        if path != self.generates or body["model"] not in self.models:
            return Reply({"error": "Not Found"}, 404)
        assert body.keys() <= set(_FIELDS.split()) or not self.published
        if body.get("top_k") == 1:
            value = 0.0 if self.mode == "processed_logprobs" else -2.5
            return Reply({"choices": [{"logprobs": {"token_logprobs": [value]}}]})
        return Reply(events=self._events(body, fault))

    def _events(self, body: Any, fault: str) -> Iterator[Any]:
        prompt = list(body["prompt"])
        prompt[2:3] = [prompt[2] + 1] if fault == "echo" else prompt[2:3]
        first = {"prompt_token_ids": prompt}
        for (token, log_prob, _), reason in self.tokens(body["prompt"], {"stop_token_ids": [], **body}):
            choice: dict[str, Any] = {"index": 0, "text": "x", "finish_reason": reason, **first}
            choice |= {"token_ids": [token], "logprobs": {"token_logprobs": [log_prob], "tokens": ["x"]}}
            choice.pop(fault, None)  # "token_ids" or "logprobs"
            if fault == "error":
                yield {"error": {"message": "out of memory", "code": 500}}
                return
            if fault in ("other stop", "other length"):
                yield {"choices": [choice | {"finish_reason": fault.removeprefix("other ")}]}
                return
            yield {"choices": [choice]}
            first = {}
        yield {"choices": [], "usage": {"completion_tokens": 1}}


class FakeTGI(FakeServer):
    """A fake of TGI 3.3's /generate, which refuses what its published interface does not have.

    The interface is `docs/openapi.json` of huggingface/text-generation-inference. The tokenizer knows "t0" to
    "t96". `prefix` comes before each prompt.
    """

    generates = "/generate"
    prefix: tuple[int, ...] = ()
    end_token = 1

    def answer(self, path: str, body: Any, fault: str) -> Reply:
        if path == "/info":
            limits = {"max_input_tokens": 4095, "max_total_tokens": 4096, "max_stop_sequences": 4}
            limits |= {"max_best_of": 2, "max_concurrent_requests": 128, "max_client_batch_size": 4}
            about = {"model_id": "tiny", "version": "3.3.6", "router": "text-generation-router"}
            return Reply(about | limits | {"validation_workers": 2})
        params = body["parameters"]
        assert body.keys() == {"inputs", "parameters"} and params.keys() <= _TGI_PARAMETERS.keys()
        for name, value in params.items():
            kind, low, high = _TGI_PARAMETERS[name]
            if type(value) is not kind or (low is not None and not low < value < high):
                error = f"`{name}` is {value}, which the interface does not allow"
                return Reply({"error": error, "error_type": "validation"}, 422)
        assert len(params["stop"]) <= 4
        prompt = [*self.prefix, *(int(word[1:]) for word in body["inputs"].split())]
        prompt[2:3] = [prompt[2] + 1] if fault == "echo" else prompt[2:3]
        sampling = {**params, "max_tokens": params["max_new_tokens"], "stop_token_ids": [self.end_token]}
        pairs = list(self.tokens(prompt, sampling))
        tokens = [{"id": token, "text": "x", "logprob": lp, "special": False} for (token, lp, _), _ in pairs]
        reason = "eos_token" if pairs[-1][1] == "stop" else "length"
        prefill = [{"id": token, "text": "x", "logprob": None} for token in prompt]
        details = {"finish_reason": reason, "generated_tokens": len(tokens), "seed": params["seed"]}
        return Reply({"generated_text": "x", "details": details | {"prefill": prefill, "tokens": tokens}})


if __name__ == "__main__":
    with FakeOpenAI(pause_s=float(sys.argv[1])) as server:
        print(server.url, flush=True)
        while True:
            time.sleep(1)
