import pytest

from tandem.config.data import DataConfig
from tandem.errors import DataError
from tandem.observability.run import RunFolder
from tandem.workers.data import DataFacts, DataWorker
from tests.support.tiny import make_tokenizer, write_problems


def config(folder, **changes):
    train, val = write_problems(folder)
    given = {"train_files": (str(train),), "val_files": (str(val),), "train_batch_size": 5, "seed": 3}
    return DataConfig.model_validate(given | changes)


def test_batches_are_functions_of_their_numbers(tmp_path):
    settings, run = config(tmp_path, val_batch_size=3), RunFolder(tmp_path / "run")
    worker, again = (DataWorker(settings, make_tokenizer(tmp_path), run) for _ in range(2))
    facts = worker.describe()
    assert facts == DataFacts(24, 3, facts.digest, sources=("arithmetic",), longest_prompt=5)
    assert facts.digest == again.describe().digest
    epoch = [worker.train_batch(number).non_tensor_batch["uid"].tolist() for number in range(8)]
    assert len({uid for batch in epoch for uid in batch}) == 40
    for number in (6, 2, 2, 7):
        assert again.train_batch(number).non_tensor_batch["uid"].tolist() == epoch[number]
    uids = [uid for number in range(3) for uid in worker.val_batch(number).non_tensor_batch["uid"]]
    assert uids == [f"val-{row}" for row in range(8)]
    assert worker.take_timings()["timing/data"] > 0


def test_without_validation_data_there_are_no_batches_of_it(tmp_path):
    worker = DataWorker(config(tmp_path, val_files=()), make_tokenizer(tmp_path), RunFolder(tmp_path / "run"))
    assert worker.describe().val_batches == 0


def test_data_that_are_refused_leave_no_trace(tmp_path):
    run = RunFolder(tmp_path / "run")
    with pytest.raises(DataError, match="do not fill one batch"):
        DataWorker(config(tmp_path, train_batch_size=25), make_tokenizer(tmp_path), run)
    assert not run.timeline_file.exists()
    run.remove_if_unused()
    assert not run.path.exists()
