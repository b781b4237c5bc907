"""`tandem generate`: a file of prompts to a file of responses, with no training around it.

Each finished response goes to a journal beside the output. A run that was killed goes on from there, by the
same command, with the responses that are missing; the random numbers of a response depend on the seed, its
row and its number alone, so that they are the ones it would have got.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedTokenizerBase

from tandem.config.generate import (
    EvalModelConfig,
    GenerateConfig,
    OfflineRolloutConfig,
    OfflineTrainerConfig,
    RowsConfig,
    SampledModelConfig,
)
from tandem.data.forms import PromptForm
from tandem.data.reader import PromptRows
from tandem.data.rows import check_new_columns, write_rows
from tandem.device import choose_device
from tandem.engines.rollout.base import RolloutEngine, SharedModule, WeightStream, finished
from tandem.engines.rollout.registry import make_rollout_engine, stall_timeout_s
from tandem.engines.weight_sync import Sent, check_arrival, digest
from tandem.errors import DataError
from tandem.hub import fetch_weights
from tandem.models.ends import stop_token_ids
from tandem.models.loading import load_policy
from tandem.models.vocabulary import tokenizer_of
from tandem.observability.journal import Journal
from tandem.observability.lock import ProcessLock
from tandem.observability.progress import Progress
from tandem.protocol import Request, Sample
from tandem.trainer.sampling_params import sampling_params

COLUMNS = ("responses", "response_ids", "response_log_probs", "finish_reasons")
"""The columns added to each row: lists, whose place i is the prompt's sample i."""

_TYPES = pa.types
_IN_JSON: tuple[Callable[[pa.DataType], bool], ...] = (
    *(_TYPES.is_null, _TYPES.is_boolean, _TYPES.is_integer, _TYPES.is_float32, _TYPES.is_float64),
    *(_TYPES.is_string, _TYPES.is_large_string, _TYPES.is_string_view),
    *(_TYPES.is_date, _TYPES.is_time, _TYPES.is_timestamp, _TYPES.is_decimal),  # as text
)


def generate_file(config: GenerateConfig, *, overwrite: bool, say: Callable[[str], None]) -> Path:
    """Writes the responses to the prompts of a file to `config.data.output_path`.

    Args:
        overwrite: replace that file, and drop what an earlier run left unfinished.
        say: prints a sentence to the user.

    Raises:
        ConfigError: unfinished work of other settings is there; another process writes it.
        DataError, ModelError, EngineError: the data, the model or the engine cannot be used; the output is
            there.
    """
    output = Path(config.data.output_path)
    with alone(output, "data.output_path", say):
        return _generate(config, output, overwrite, say)


def _generate(config: GenerateConfig, output: Path, overwrite: bool, say: Callable[[str], None]) -> Path:
    work = beside(output, "work")
    check_new_outputs([output], [work], overwrite)
    tokenizer = tokenizer_of(config.model)
    rows = read_rows(config.data, tokenizer, say)
    check_new_columns(rows.table, COLUMNS)
    if output.suffix == ".jsonl":
        _check_json(rows.table)
    offline = Offline(config.data, config.model, config.rollout, config.trainer, tokenizer, rows)
    journal = Journal(work, offline.settings(), overwrite=overwrite)
    if journal.entries:
        say(f"{len(journal.entries)} responses are there already; going on with the others")
    samples = [sample for part in offline.samples(journal, say) for sample in part]
    write_rows(output, rows.table, response_columns(samples, tokenizer, config.rollout.n))
    journal.remove()
    return output


def alone(output: Path, field: str, say: Callable[[str], None]) -> ProcessLock:
    """The lock of what one process writes, beside it; taking it makes the folder.

    Args:
        field: the config key or argument that names the output.
    """
    return ProcessLock(output.with_name(f"{output.name}.lock"), field, say)


def check_new_outputs(outputs: Sequence[Path], journals: Sequence[Path], overwrite: bool) -> None:
    """
    Args:
        outputs: the files to be written.
        journals: of their unfinished work. Where one is there, so may be an output: a run that was killed
            right at its end is gone on with.

    Raises:
        DataError: one is there, and is not to be replaced.
    """
    there = [] if overwrite or any(map(Path.exists, journals)) else list(filter(Path.exists, outputs))
    if there:
        raise DataError(
            "the output is there already",
            field="data.output_path",
            got=there[0],
            remedy="choose another name, or replace it with --overwrite",
        )


def beside(output: Path, what: str) -> Path:
    """The path of a journal."""
    return output.with_name(f"{output.name}.{what}.jsonl")


def read_rows(
    data: RowsConfig,
    tokenizer: PreTrainedTokenizerBase,
    say: Callable[[str], None],
    *,
    needs: Sequence[str] = (),
) -> PromptRows:
    """The rows and their prompts.

    Args:
        needs: further columns that must be there.

    Raises:
        DataError: see `PromptRows`.
    """
    rows = PromptRows(
        data.path,
        tokenizer,
        form=PromptForm(prompt_key=data.prompt_key, needs=None, beside=tuple(needs)),
        max_prompt_length=data.max_prompt_length,
        truncation=data.truncation,
        filter_overlong_prompts=data.filter_overlong_prompts,
        max_samples=data.max_samples,
        chat_template_kwargs=data.apply_chat_template_kwargs,
        workers=data.filter_overlong_prompts_workers,
        cache_dir=data.cache_dir,
    )
    if rows.dropped:
        say(f"{rows.dropped} prompts are over the length limit and left out")
    return rows


class Offline:
    """One model's responses to the prompts of some rows.

    Args:
        data, model, rollout, trainer: the config's sections.
        tokenizer: the model's.
        rows: what to answer; n responses each.
    """

    def __init__(
        self,
        data: RowsConfig,
        model: SampledModelConfig | EvalModelConfig,
        rollout: OfflineRolloutConfig,
        trainer: OfflineTrainerConfig,
        tokenizer: PreTrainedTokenizerBase,
        rows: PromptRows,
    ) -> None:
        assert model.path is not None
        fetch_weights(model.path)
        self._folder = model.path
        self._model, self._rollout, self._trainer, self._tokenizer = model, rollout, trainer, tokenizer
        self._longest = int(rows.tokens.lengths.max()) + data.max_response_length
        self._params = sampling_params(
            rollout,
            rollout,
            stop_token_ids(model.path, tokenizer),
            temperature=rollout.temperature,
            max_tokens=data.max_response_length,
            seed=trainer.seed,
        )
        self.requests = [
            Request(str(row), sample, prompt.numpy().astype(np.int64), self._params)
            for row, prompt in enumerate(rows.tokens)
            for sample in range(rollout.n)
        ]

    def settings(self) -> dict[str, Any]:
        """The settings that the responses depend on, plain values by the name of the key. A key that only
        decides how fast they come may change between a run and its continuation."""
        prompts = hashlib.blake2b(digest_size=8)
        for request in self.requests[:: self._rollout.n]:
            prompts.update(len(request.prompt_ids).to_bytes(8, "little") + request.prompt_ids.tobytes())
        return {
            "data.path (prompts)": prompts.hexdigest(),
            "model.path": [self._folder, *_weight_files(Path(self._folder))],
            "rollout.name": self._rollout.name,
            "rollout.dtype": self._rollout.dtype,
            "rollout.n": self._rollout.n,
            "rollout.logprobs_mode": self._rollout.logprobs_mode,
            "rollout (sampling)": repr(self._params),
        }

    def samples(self, journal: Journal, say: Callable[[str], None]) -> Iterator[list[Sample]]:
        """All samples: at once those that the journal holds, then the others as they finish, each of
        them in the journal before it is given.

        Raises:
            ModelError, EngineError: the model or the engine cannot be used.
        """
        kept = {sample.id: sample for sample in map(_from_entry, journal.entries)}
        left = [request for request in self.requests if request.id not in kept]
        if kept:
            yield list(kept.values())
        if not left:
            return
        say(f"{len(left)} responses to write; loading the model")
        device = choose_device(self._trainer.device)
        with closing(self._engine(device, say)) as engine:
            self._give_weights(engine, device)
            limit_s = stall_timeout_s(self._rollout)
            with (
                Progress("generate", len(self.requests), done=len(kept)) as progress,
                closing(finished(engine, left, stall_timeout_s=limit_s)) as parts,
            ):
                for part in parts:
                    journal.append(map(_to_entry, part))
                    progress.advance(len(part), sum(len(sample.token_ids) for sample in part))
                    yield part

    def _engine(self, device: torch.device, say: Callable[[str], None]) -> RolloutEngine:
        return make_rollout_engine(
            self._rollout.name,
            self._rollout,
            tokenizer=self._tokenizer,
            device=device,
            max_length=self._longest,
            log=say,
            say=say,
            model_path=str(self._folder),
            dtype=getattr(torch, self._rollout.dtype),
        )

    def _give_weights(self, engine: RolloutEngine, device: torch.device) -> None:
        """Hands the model's weights to an engine that takes some.

        Raises:
            WeightSyncError: it holds others than it was given.
        """
        if not engine.takes:
            return
        model = load_policy(
            self._folder,
            dtype=getattr(torch, self._rollout.dtype),
            device=device,
            trust_remote_code=self._model.trust_remote_code,
        )
        model.train(False)
        shares = SharedModule in engine.takes
        source = SharedModule(model) if shares else WeightStream(model.named_parameters())
        sent = Sent(0, digest(model.named_parameters()))
        check_arrival(sent, engine.update_weights(source, 0), engine=self._rollout.name)


def response_columns(
    samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase, n: int
) -> dict[str, pa.Array]:
    """`COLUMNS`, one list per row.

    Args:
        samples: n of each row, in any order.
    """
    ordered = sorted(samples, key=lambda sample: (int(sample.uid), sample.sample))
    groups = [ordered[start : start + n] for start in range(0, len(ordered), n)]
    texts, ids, log_probs, reasons = COLUMNS
    return {
        texts: pa.array([[response_text(tokenizer, s) for s in group] for group in groups]),
        ids: pa.array([[s.token_ids for s in group] for group in groups], pa.list_(pa.list_(pa.int64()))),
        log_probs: pa.array(
            [[s.log_probs for s in group] for group in groups], pa.list_(pa.list_(pa.float32()))
        ),
        reasons: pa.array([[s.finish_reason for s in group] for group in groups]),
    }


def response_text(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> str:
    return str(tokenizer.decode(sample.token_ids.tolist(), skip_special_tokens=True))


def _weight_files(folder: Path) -> list[list[Any]]:
    """Name, bytes and time of change of each file in the folder: a model that was trained on is another."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _to_entry(sample: Sample) -> dict[str, Any]:
    return {
        "row": int(sample.uid),
        "sample": sample.sample,
        "token_ids": sample.token_ids.tolist(),
        "log_probs": sample.log_probs.astype(np.float32).tolist(),
        "finish_reason": sample.finish_reason,
    }


def _from_entry(entry: dict[str, Any]) -> Sample:
    tokens = np.array(entry["token_ids"], dtype=np.int64)
    return Sample(
        uid=str(entry["row"]),
        sample=entry["sample"],
        token_ids=tokens,
        log_probs=np.array(entry["log_probs"], dtype=np.float32),
        versions=np.zeros(len(tokens), dtype=np.int32),
        finish_reason=entry["finish_reason"],
    )


def _check_json(table: pa.Table) -> None:
    """Refuses a table that does not fit into JSON lines.

    Raises:
        DataError: a column that JSON cannot hold.
    """
    for column in table.schema:
        unfit = _unfit_for_json(column.type)
        if unfit is not None:
            raise DataError(
                f"{unfit} cannot be written as JSON",
                field=column.name,
                got=column.type,
                remedy="name a .parquet file as data.output_path",
            )


def _unfit_for_json(kind: pa.DataType) -> pa.DataType | None:
    """The type, or the part of it, that JSON cannot hold, if there is one."""
    if pa.types.is_dictionary(kind):
        return _unfit_for_json(kind.value_type)
    if kind.num_fields:
        parts = (_unfit_for_json(kind.field(at).type) for at in range(kind.num_fields))
        return next((part for part in parts if part is not None), None)
    return None if any(fits(kind) for fits in _IN_JSON) else kind
