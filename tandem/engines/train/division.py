"""The process groups that divide an engine's model over ranks, checked before any weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tandem.config.fsdp import FSDPConfig
from tandem.engines.train.module import Settings
from tandem.errors import EngineError, ModelError
from tandem.models.collectives import CollectiveMeter
from tandem.models.expert_parallel import ExpertGroup, check_expert_parallel
from tandem.models.loading import load_config
from tandem.models.parallel import Grid, init_distributed
from tandem.models.pipeline import Pipeline, check_pipeline
from tandem.models.policy import PackedModel
from tandem.models.sequence_parallel import SequenceSplit
from tandem.models.tensor_group import TensorGroup
from tandem.models.tensor_parallel import check_tensor_parallel, parallelize


@dataclass(frozen=True, eq=False)
class Division:
    """The groups of this rank for sequence, tensor, expert and pipeline parallelism.

    Attributes:
        grid: the device meshes of all ranks.
        sequence: the group of ranks that share the tokens of each micro-batch. None: no sequence parallelism.
        tensor: the group of ranks that split each layer. None: no tensor parallelism.
        experts: the group of ranks that divide the experts of each mixture. None: no expert parallelism.
        pipeline: the pipeline of this rank. None: no pipeline parallelism.
    """

    grid: Grid
    sequence: SequenceSplit | None
    tensor: TensorGroup | None
    experts: ExpertGroup | None
    pipeline: Pipeline | None

    @classmethod
    def of(
        cls, model_path: str | Path, settings: Settings, sequence_parallel: int, meter: CollectiveMeter
    ) -> Division:
        """Start the process groups and divide the model over the ranks.

        Args:
            model_path: the model's folder.
            settings: the engine's config sections and device.
            sequence_parallel: number of ranks that share the tokens of each micro-batch.
            meter: the meter for the communication in these groups.

        Raises:
            ConfigError: a parallel size does not divide the number of ranks, or a dimension of the model.
            ModelError: the attention heads cannot be divided, the layers cannot be split, there are no
                experts to divide, or the model cannot be split into pipeline stages.
        """
        fsdp: FSDPConfig = settings.fsdp
        init_distributed(settings.device)
        grid = Grid.over_all_ranks(
            settings.device,
            fsdp_size=fsdp.fsdp_size,
            sequence=sequence_parallel,
            tensor=fsdp.tensor_parallel_size,
            experts=fsdp.expert_parallel_size,
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
        check_expert_parallel(config, fsdp.expert_parallel_size)
        experts = None if grid.experts is None else ExpertGroup(grid.experts, meter)
        if fsdp.pipeline_parallel_size > 1:
            check_pipeline(config, fsdp.pipeline_parallel_size)
            pipeline = Pipeline.of(grid.work, meter)
        return cls(grid, split, group, experts, pipeline)

    def check_layout(self, module: PackedModel) -> None:
        """Check that the model packs its sequences if ranks share tokens, and that it has experts to divide.

        Raises:
            ModelError: each sequence needs a row of its own, but ranks share tokens; or there are no experts.
        """
        if self.experts is not None:
            self.experts.check(module)
        if module.in_rows and self.sequence is not None:
            raise ModelError(
                "sequence parallelism needs packed sequences, and this architecture cannot pack them",
                field="ulysses_sequence_parallel_size",
                got=f"{self.sequence.size}, {type(module.model).__name__}",
                expected="1",
                remedy="set ulysses_sequence_parallel_size=1; FSDP shards any model",
            )

    def divide(self, module: PackedModel) -> None:
        """Divide the layers and the experts of a whole model over the ranks, before FSDP shards it.

        Raises:
            ConfigError: a layer cannot be divided evenly.
        """
        if self.tensor is not None:
            parallelize(module, self.tensor)
        if self.experts is not None:
            self.experts.divide(module)

    @property
    def whole(self) -> bool:
        """Whether each rank has all layers and experts when FSDP has gathered its shards."""
        return self.tensor is None and self.experts is None and self.pipeline is None

    def check_whole(self) -> None:
        """Check that the model is `whole`.

        Raises:
            EngineError: the model is divided by tensor, expert or pipeline parallelism.
        """
        for name, part, has in (
            ("pipeline", self.pipeline, "the layers of its pipeline stage"),
            ("tensor", self.tensor, "a part of every layer"),
            ("expert", self.experts, "a part of the experts"),
        ):
            if part is not None:
                raise EngineError(
                    f"the engine cannot give out its whole module: each rank has only {has}",
                    field=f"fsdp_config.{name}_parallel_size",
                    got=part.size,
                    expected="1, or a rollout engine that receives a stream of weights",
                )
