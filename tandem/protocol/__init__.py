"""Data types that Tandem's processes exchange: ragged batches, rollout requests and samples."""

from tandem.protocol.data import DataProto
from tandem.protocol.ragged import Ragged
from tandem.protocol.rollout import Request, Sample, SamplingParams, stable_hash

__all__ = ["DataProto", "Ragged", "Request", "Sample", "SamplingParams", "stable_hash"]
