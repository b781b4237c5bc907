"""The config of `tandem sft`."""

from __future__ import annotations

from tandem.config.section import key
from tandem.config.supervised import SupervisedConfig, SupervisedDataConfig

DATA = "data.sft"


class SFTDataConfig(SupervisedDataConfig):
    """Demonstrations for supervised fine-tuning."""

    response_key: str = key("response", "column of the response to the prompt", read_by=DATA)
    messages_key: str = key(
        "messages", "column of whole conversations; assistant turns are learned", read_by=DATA
    )


class SFTConfig(SupervisedConfig):
    """The whole config of `tandem sft`."""

    data: SFTDataConfig
