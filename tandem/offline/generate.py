"""Generate responses to a file of prompts, without training (`tandem generate`).

Each finished response is written to a journal next to the output. If a run was killed, the same command
continues with the missing responses. The random numbers of a response depend only on the seed, the row and
the response's number, so a continued run generates the same responses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from tandem.config.generate import EvalConfig, GenerateConfig
from tandem.data.chat import TEMPLATE_KEY
from tandem.data.forms import PromptForm
from tandem.data.prompts import PromptDataset
from tandem.data.rows import check_new_columns, write_rows
from tandem.device import choose_device
from tandem.engines.rollout.base import RolloutEngine, SharedModule, WeightStream, finished
from tandem.engines.rollout.registry import make_rollout_engine, stall_timeout_s
from tandem.engines.weight_sync import Sent, check_arrival, module_digest
from tandem.errors import DataError
from tandem.models.ends import stop_token_ids
from tandem.models.loading import load_policy
from tandem.models.resized import complete_weights
from tandem.models.vocabulary import tokenizer_of
from tandem.models.weight_files import stored_tensors
from tandem.observability.journal import Journal
from tandem.observability.lock import ProcessLock
from tandem.observability.progress import Progress
from tandem.protocol import Request, Sample
from tandem.trainer.sampling_params import sampling_params

COLUMNS = ("responses", "response_ids", "response_log_probs", "finish_reasons")
"""The columns that are added to each row: lists in which entry i belongs to the prompt's sample i."""

_TYPES = pa.types
_IN_JSON: tuple[Callable[[pa.DataType], bool], ...] = (
    *(_TYPES.is_null, _TYPES.is_boolean, _TYPES.is_integer, _TYPES.is_float32, _TYPES.is_float64),
    *(_TYPES.is_string, _TYPES.is_large_string, _TYPES.is_string_view),
    *(_TYPES.is_date, _TYPES.is_time, _TYPES.is_timestamp, _TYPES.is_decimal),  # as text
)


def generate_file(config: GenerateConfig, *, overwrite: bool, say: Callable[[str], None]) -> Path:
    """Write the responses to the prompts of a file to `config.data.output_path`.

    Args:
        config: the config of the command.
        overwrite: replace that file, and delete the unfinished work of an earlier run.
        say: prints a sentence to the user.

    Returns:
        The file.

    Raises:
        ConfigError: If there is unfinished work with other settings, or another process writes the file.
        DataError: If the data cannot be used, or the output already exists.
        ModelError: If the model cannot be used.
        EngineError: If the engine cannot be used.
    """
    output = Path(config.data.output_path)
    with alone(output, "data.output_path", say):
        work = beside(output, "work")
        check_new_outputs([output], [work], overwrite)
        offline = Offline(config, say)
        journal = Journal(work, offline.settings(), overwrite=overwrite)
        if journal.entries:
            say(f"{len(journal.entries)} responses already exist; continuing with the others")
        samples = [sample for part in offline.samples(journal) for sample in part]
        write_rows(output, offline.rows.table, offline.columns(samples))
        journal.remove()
        return output


def alone(output: Path, field: str, say: Callable[[str], None]) -> ProcessLock:
    """Return the lock of an output that only one process may write. Acquiring it creates the folder.

    Args:
        output: the file or folder; the lock's file is next to it.
        field: the config key or argument that names the output.
        say: prints a sentence to the user.
    """
    return ProcessLock(output.with_name(f"{output.name}.lock"), field, say)


def check_new_outputs(outputs: Sequence[Path], journals: Sequence[Path], overwrite: bool) -> None:
    """Check that no output exists, unless it may be replaced.

    If a journal exists, an output may exist too, because a run may have been killed at its very end.

    Args:
        outputs: the files to write.
        journals: the journals of their unfinished work.
        overwrite: whether the files may be replaced.

    Raises:
        DataError: If an output exists and must not be replaced.
    """
    there = [] if overwrite or any(map(Path.exists, journals)) else list(filter(Path.exists, outputs))
    if there:
        raise DataError(
            "the output already exists",
            field="data.output_path",
            got=there[0],
            remedy="choose another name, or replace the output with --overwrite",
        )


def beside(output: Path, what: str) -> Path:
    """Return the path of a journal, next to the output."""
    return output.with_name(f"{output.name}.{what}.jsonl")


class Offline:
    """The responses of one model to the prompts of some rows, n per prompt.

    Args:
        config: the config of the command.
        say: prints a sentence to the user.
        needs: additional columns that must exist.

    Attributes:
        rows: the rows with the prompts.

    Raises:
        DataError: If the rows cannot be read, or have a column with a name that the output needs.
    """

    def __init__(
        self, config: GenerateConfig | EvalConfig, say: Callable[[str], None], needs: Sequence[str] = ()
    ) -> None:
        data, rollout = config.data, config.rollout
        assert config.model.path is not None
        self._config, self._say, self._folder = config, say, config.model.path
        self._tokenizer = tokenizer_of(config.model)
        self.rows = PromptDataset(
            data.path,
            self._tokenizer,
            form=PromptForm(prompt_key=data.prompt_key, needs=None, beside=tuple(needs)),
            optional=None,
            max_prompt_length=data.max_prompt_length,
            truncation=data.truncation,
            filter_overlong_prompts=data.filter_overlong_prompts,
            max_samples=data.max_samples,
            chat_template_kwargs=data.apply_chat_template_kwargs,
            template_key=TEMPLATE_KEY,
            workers=data.filter_overlong_prompts_workers,
            cache_dir=data.cache_dir,
        )
        if self.rows.dropped:
            say(f"{self.rows.dropped} prompts are longer than the limit and are left out")
        check_new_columns(self.rows.table, COLUMNS)
        if data.output_path.endswith(".jsonl"):
            _check_json(self.rows.table)
        complete_weights(self._folder, trust_remote_code=config.model.trust_remote_code)
        self._params = sampling_params(
            rollout,
            rollout,
            stop_token_ids(self._folder, self._tokenizer),
            temperature=rollout.temperature,
            max_tokens=data.max_response_length,
            seed=config.trainer.seed,
        )
        self.requests = [
            Request(str(row), sample, prompt.numpy().astype(np.int64), self._params)
            for row, prompt in enumerate(self.rows.tokens)
            for sample in range(rollout.n)
        ]

    def settings(self) -> dict[str, Any]:
        """Return a dict from key to value of the settings that affect the responses.

        Keys that only affect speed are left out, so they may change when a run is continued.
        """
        rollout, prompts = self._config.rollout, hashlib.blake2b(digest_size=8)
        for request in self.requests[:: rollout.n]:
            prompts.update(len(request.prompt_ids).to_bytes(8, "little") + request.prompt_ids.tobytes())
        folder = sorted(path for path in Path(self._folder).iterdir() if path.is_file())
        # the sizes and times of the files show whether the model was trained further
        files = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in folder]
        return {
            "data.path (prompts)": prompts.hexdigest(),
            "model.path": [self._folder, *files],
            "rollout.name": rollout.name,
            "rollout.dtype": rollout.dtype,
            "rollout.n": rollout.n,
            "rollout.logprobs_mode": rollout.logprobs_mode,
            "rollout (sampling)": repr(self._params),
        }

    def samples(self, journal: Journal) -> Iterator[list[Sample]]:
        """Yield all samples: first the samples in the journal, then new samples as they finish.

        Each new sample is written to the journal before it is yielded.

        Raises:
            ModelError: If the model cannot be used.
            EngineError: If the engine cannot be used.
        """
        kept = {sample.id: sample for sample in map(_from_entry, journal.entries)}
        left = [request for request in self.requests if request.id not in kept]
        if kept:
            yield list(kept.values())
        if not left:
            return
        self._say(f"{len(left)} responses to generate; loading the model")
        rollout, device = self._config.rollout, choose_device(self._config.trainer.device)
        made = make_rollout_engine(
            rollout.name,
            rollout,
            tokenizer=self._tokenizer,
            device=device,
            max_length=self.rows.longest + self._config.data.max_response_length,
            log=self._say,
            say=self._say,
            model_path=str(self._folder),
            dtype=getattr(torch, rollout.dtype),
        )
        with closing(made) as engine:
            self._give_weights(engine, device)
            limit_s = stall_timeout_s(rollout)
            with (
                Progress("generate", len(self.requests), done=len(kept)) as progress,
                closing(finished(engine, left, stall_timeout_s=limit_s)) as parts,
            ):
                for part in parts:
                    journal.append(map(_to_entry, part))
                    progress.advance(len(part), sum(len(sample.token_ids) for sample in part))
                    yield part

    def _give_weights(self, engine: RolloutEngine, device: torch.device) -> None:
        """Send the model's weights to the engine, if the engine accepts weights.

        Raises:
            WeightSyncError: If the engine has received different weights.
        """
        if not engine.takes:
            return
        model = load_policy(
            self._folder,
            dtype=getattr(torch, self._config.rollout.dtype),
            device=device,
            trust_remote_code=self._config.model.trust_remote_code,
        )
        model.train(False)
        shares = SharedModule in engine.takes
        source = SharedModule(model) if shares else WeightStream(iter(stored_tensors(model).items()))
        sent = Sent(0, module_digest(model))
        check_arrival(sent, engine.update_weights(source, 0), engine=self._config.rollout.name)

    def text(self, sample: Sample) -> str:
        """Return the text of a response."""
        return str(self._tokenizer.decode(sample.token_ids.tolist(), skip_special_tokens=True))

    def columns(self, samples: Sequence[Sample]) -> dict[str, pa.Array]:
        """Return the columns `COLUMNS`, one list per row.

        Args:
            samples: all samples, in any order.
        """
        n = self._config.rollout.n
        ordered = sorted(samples, key=lambda sample: (int(sample.uid), sample.sample))
        groups = [ordered[start : start + n] for start in range(0, len(ordered), n)]
        reads: list[tuple[Callable[[Sample], Any], pa.DataType]] = [
            (self.text, pa.string()),
            (attrgetter("token_ids"), pa.list_(pa.int64())),
            (attrgetter("log_probs"), pa.list_(pa.float32())),
            (attrgetter("finish_reason"), pa.string()),
        ]
        return {
            name: pa.array([list(map(read, group)) for group in groups], pa.list_(kind))
            for name, (read, kind) in zip(COLUMNS, reads, strict=True)
        }


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
    """Check that a table can be written as JSON lines.

    Raises:
        DataError: If JSON cannot represent a column.
    """
    for column in table.schema:
        if (unfit := _unfit_for_json(column.type)) is not None:
            raise DataError(
                f"{unfit} cannot be written as JSON",
                field=column.name,
                got=column.type,
                remedy="set data.output_path to a .parquet file",
            )


def _unfit_for_json(kind: pa.DataType) -> pa.DataType | None:
    """Return the type, or the nested type in it, that JSON cannot represent; None if JSON can."""
    if pa.types.is_dictionary(kind):
        return _unfit_for_json(kind.value_type)
    if kind.num_fields:
        parts = (_unfit_for_json(kind.field(at).type) for at in range(kind.num_fields))
        return next((part for part in parts if part is not None), None)
    return None if any(fits(kind) for fits in _IN_JSON) else kind
