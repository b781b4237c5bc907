"""A user's own datasets and samplers with verl's signatures: torch classes that do not know Tandem."""

import numpy as np
import pytest
import torch

from tandem.config.data import DataConfig
from tandem.data.curriculum import DrawnBatches, load_sampler
from tandem.data.own import OwnPrompts
from tandem.errors import ConfigError, DataError
from tandem.protocol import DataProto
from tandem.rewards.signatures import VERLS
from tandem.workers.data import prompt_dataset
from tests.data.cases import chatml, talk

DATASETS = '''
import torch
from torch.utils.data import Dataset


class Chat(Dataset):
    """Rows as in verl 0.7 and later: messages, which the rollout formats."""

    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        assert processor is None and config.prompt_key == "prompt" and config.get("missing", 7) == 7
        self.count, self.read = int(open(data_files[0]).read()), []
        if max_samples > 0:
            self.count = min(self.count, max_samples)

    def __len__(self):
        return self.count

    def __getitem__(self, item):
        self.read.append(item)
        return {
            "raw_prompt": [{"role": "user", "content": f"{item}+{item}="}],
            "dummy_tensor": torch.tensor([0], dtype=torch.uint8),
            "data_source": "even" if item % 2 == 0 else "odd",
            "reward_model": {"style": "rule", "ground_truth": str(2 * item)},
            "extra_info": {"index": item},
            "index": item,
        }


class Padded(Chat):
    """Rows as in verl 0.6: token ids with padding on the left."""

    def __init__(self, data_files, tokenizer, processor, config):
        super().__init__(data_files, tokenizer, config, processor)
        self.tokenizer, self.longest = tokenizer, config.max_prompt_length

    def __getitem__(self, item):
        ids = self.tokenizer.encode("7" * (1 + item), add_special_tokens=False)
        pad = self.longest - len(ids)
        row = super().__getitem__(item)
        row["input_ids"] = torch.tensor([99] * pad + ids)
        row["attention_mask"] = torch.tensor([0] * pad + [1] * len(ids))
        return row


class Broken(Chat):
    def __getitem__(self, item):
        return super().__getitem__(item) | ({"reward_model": None} if item == 3 else {})


class Strange(Chat):
    def __init__(self, files):
        pass
'''
SAMPLERS = '''
class Sorted:
    """A sampler with the interface of verl's AbstractCurriculumSampler."""

    def __init__(self, data_source, data_config):
        self.sources = [data_source[row]["data_source"] for row in range(len(data_source))]
        self.first, self.told = data_config.get("seed"), []

    def __iter__(self):
        yield from sorted(range(len(self.sources)), key=lambda row: (self.sources[row], -row))

    def __len__(self):
        return len(self.sources)


class Learning(Sorted):
    def update(self, batch):
        scores = batch.batch["token_level_scores"].sum(-1)
        self.told += zip(batch.non_tensor_batch["index"].tolist(), scores.tolist())


class Saved(Learning):
    place = 0

    def __iter__(self):
        while True:
            self.place += 1
            yield (self.place - 1) % len(self.sources)

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]
'''


def own(tmp_path, tokenizer, name, rows=6, *, text=DATASETS, **keys):
    (tmp_path / "own.py").write_text(text)
    (tmp_path / "rows.txt").write_text(str(rows))
    files, cls = (str(tmp_path / "rows.txt"),), {"path": str(tmp_path / "own.py"), "name": name}
    config = DataConfig(train_files=files, custom_cls=cls, **keys)
    return prompt_dataset(config, tokenizer, files, config.train_max_samples, VERLS)


def test_rows_of_messages_are_formatted_and_scored(tmp_path, tokenizer):
    dataset = own(tmp_path, tokenizer, "Chat", train_max_samples=5)
    assert isinstance(dataset, OwnPrompts) and (len(dataset), dataset.data_sources) == (5, ("even", "odd"))
    batch = dataset.batch([4, 1], uid_prefix=[0, 3])
    texts = [tokenizer.decode(ids) for ids in batch.ragged("prompts")]
    assert texts == [chatml("4+4="), chatml("1+1=")]
    columns = {name: list(column) for name, column in batch.non_tensor_batch.items()}
    assert columns["ground_truth"] == ["8", "2"] and columns["uid"] == ["0-4", "3-1"]
    assert columns["messages"][0] == talk("4+4=")
    assert columns["data_source"] == ["even", "odd"] and columns["extra_info"][1] == {"index": 1}
    assert list(dataset.recall(["3-1"]).non_tensor_batch["uid"]) == ["3-1"]
    assert dataset.places_of_sources(("odd", "even")).tolist() == [1, 0, 1, 0, 1]


@pytest.mark.parametrize(("keys", "kept"), [
    ({"max_prompt_length": 9}, [1, 2, 3, 4, 5, 6]), ({"filter_overlong_prompts": True}, [1, 2, 3, 4]),
    ({"truncation": "left"}, [1, 2, 3, 4, 4, 4]),
])  # fmt: skip
def test_padded_ids_are_taken_without_padding_and_left_out_or_cut(tmp_path, tokenizer, keys, kept):
    text = DATASETS.replace("config.max_prompt_length", "9")
    dataset = own(tmp_path, tokenizer, "Padded", text=text, **{"max_prompt_length": 4, **keys})
    assert dataset.longest == max(kept)
    prompts = dataset.batch(range(len(dataset)), uid_prefix="0").ragged("prompts")
    assert [tokenizer.decode(ids) for ids in prompts] == ["7" * count for count in kept]


@pytest.mark.parametrize(("name", "error", "field"), [
    ("Broken", DataError, None), ("Strange", ConfigError, "data.custom_cls.name"),
    ("Missing", ConfigError, "data.custom_cls.name"),
])  # fmt: skip
def test_what_is_wrong_is_said_before_training(tmp_path, tokenizer, name, error, field):
    with pytest.raises(error) as caught:
        own(tmp_path, tokenizer, name)
    assert (
        "row 3: reward_model is null" in str(caught.value) if field is None else caught.value.field == field
    )


def drawn(tmp_path, dataset, name):
    (tmp_path / "samplers.py").write_text(SAMPLERS)
    path = str(tmp_path / "samplers.py")
    sampler = load_sampler(dataset, path=path, name=name, batch_size=4, seed=1, kwargs={}, config={"seed": 1})
    return DrawnBatches(dataset, 4, sampler)


def indices(batches, numbers):
    return [batches.batch(number).non_tensor_batch["index"].tolist() for number in numbers]


def test_a_sampler_of_verls_is_iterated_in_whole_batches(tmp_path, tokenizer):
    dataset = own(tmp_path, tokenizer, "Chat", rows=10)
    batches = drawn(tmp_path, dataset, "Sorted")
    one_pass = [[8, 6, 4, 2], [0, 9, 7, 5]]  # rows 3 and 1 do not fill a batch
    assert indices(batches, range(4)) == one_pass * 2
    again = drawn(tmp_path, dataset, "Sorted")
    again.load_state_dict(drawn(tmp_path, dataset, "Sorted").state_dict() | batches.state_dict())
    assert indices(again, range(4, 6)) == one_pass


def test_it_is_told_of_scores_and_goes_on_by_its_own_state(tmp_path, tokenizer):
    dataset = own(tmp_path, tokenizer, "Chat", rows=10)
    batches = drawn(tmp_path, dataset, "Saved")
    assert indices(batches, range(2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    seen = {"index": np.array([4, 4, 6, 6])}
    batches.observe(DataProto({"scores": torch.tensor([1.0, 0.0, 1.0, 1.0])}, seen))
    assert batches._sampler._sampler.told == [(4, 0.5), (6, 1.0)]
    again = drawn(tmp_path, dataset, "Saved")
    again.load_state_dict(batches.state_dict())
    assert indices(again, range(2, 3)) == [[8, 9, 0, 1]]
    learning = drawn(tmp_path, dataset, "Learning")
    learning.batch(0)
    with pytest.raises(DataError, match="Learning with update and without state_dict"):
        drawn(tmp_path, dataset, "Learning").load_state_dict(learning.state_dict())
