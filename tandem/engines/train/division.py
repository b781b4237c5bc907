"""The division of an engine's model over its ranks, checked before any weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tandem.engines.train.module import Settings
from tandem.errors import EngineError
from tandem.models.collectives import CollectiveMeter
from tandem.models.loading import load_config
from tandem.models.parallel import Grid, init_distributed
from tandem.models.pipeline import Pipeline, check_pipeline
from tandem.models.sequence_parallel import SequenceSplit
from tandem.models.tensor_group import TensorGroup
from tandem.models.tensor_parallel import check_tensor_parallel


@dataclass(frozen=True, eq=False)
class Division:
    """The places of this rank in the grid.

    Attributes:
        grid: all of them.
        sequence: the ranks that share the tokens of its micro-batches; None: it has them to itself.
        tensor: the ranks that split the layers; None: it has them whole.
        pipeline: the ranks of the other stages; None: it has all layers.
    """

    grid: Grid
    sequence: SequenceSplit | None
    tensor: TensorGroup | None
    pipeline: Pipeline | None

    @classmethod
    def of(
        cls, model_path: str | Path, settings: Settings, sequence_parallel: int, meter: CollectiveMeter
    ) -> Division:
        """
        Args:
            sequence_parallel: ranks that share the tokens of each micro-batch.
            meter: counts what these groups exchange.

        Raises:
            ConfigError: sizes that do not divide the number of ranks, or parts of the model.
            ModelError: attention heads that cannot be shared out, layers that cannot be split, or a model of
                which no stages can be made.
        """
        fsdp, device = settings.fsdp, settings.device
        init_distributed(device)
        grid = Grid.over_all_ranks(
            device,
            fsdp_size=fsdp.fsdp_size,
            sequence=sequence_parallel,
            tensor=fsdp.tensor_parallel_size,
            stages=fsdp.pipeline_parallel_size,
        )
        config = load_config(model_path, trust_remote_code=settings.model.trust_remote_code)
        sequence, tensor = grid.work["sequence"], grid.work["tp"]
        split, group, pipeline = SequenceSplit.of(sequence, meter), None, None
        if split is not None:
            split.check(config)
        if tensor.size() > 1:
            shards = grid.weights["shard"].size()
            check_tensor_parallel(config, tensor.size(), sequence=sequence.size(), shards=shards)
            group = TensorGroup(grid.weights["tp"], meter)
        if fsdp.pipeline_parallel_size > 1:
            check_pipeline(config, fsdp.pipeline_parallel_size)
            pipeline = Pipeline.of(grid.work, meter)
        return cls(grid, split, group, pipeline)

    def check_whole(self) -> None:
        """
        Raises:
            EngineError: no rank can have it.
        """
        for name, part, has in (
            ("pipeline", self.pipeline, "the layers of its stage"),
            ("tensor", self.tensor, "its part of every layer"),
        ):
            if part is not None:
                raise EngineError(
                    f"each rank has only {has}, so no module can be shared whole",
                    field=f"fsdp_config.{name}_parallel_size",
                    got=part.size,
                    expected="1, or a receiver that takes a stream of weights",
                )
