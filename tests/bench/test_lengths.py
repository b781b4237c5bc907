import numpy as np
import pytest

from tandem.bench.lengths import lengths
from tandem.errors import ConfigError, DataError
from tandem.observability.run import RunFolder
from tests.support.folders import write_run, write_samples


def test_fixed_and_uniform():
    assert lengths("--lengths", "7", 3, 100).tolist() == [7, 7, 7]
    assert lengths("--lengths", "uniform:10:20", 5, 100).tolist() == [11, 13, 15, 17, 19]
    cut = lengths("--lengths", "uniform:10:20", 5, 15)
    assert cut.tolist() == [11, 13, 15, 15, 15]


@pytest.mark.parametrize(("mean", "p95"), [(300.0, 800.0), (50.0, 90.0)])
def test_lognormal_has_the_mean_and_the_tail_asked_for(mean, p95):
    drawn = lengths("--lengths", f"lognormal:{mean}:{p95}", 20_000, 10**6)
    assert drawn.mean() == pytest.approx(mean, rel=0.01)
    assert np.quantile(drawn, 0.95) == pytest.approx(p95, rel=0.01)
    logs = np.log(drawn)
    skew = ((logs - logs.mean()) ** 3).mean() / logs.std() ** 3
    assert skew == pytest.approx(0, abs=0.05)


def test_lengths_of_a_recorded_run(tmp_path):
    run = RunFolder(write_run(tmp_path / "run", [0.5]))
    write_samples(run, 1, [0.0] * 4)
    recorded = [1, 2, 3, 4]  # tokens of its responses
    found = lengths("--lengths", f"run:{run.path}", 401, 100)
    assert set(found.tolist()) == set(recorded)
    expected = np.mean(np.interp(np.linspace(0, 3, 401), range(4), recorded))
    assert found.mean() == pytest.approx(expected, rel=0.02)
    with pytest.raises(DataError, match="does not exist"):
        lengths("--lengths", f"run:{tmp_path / 'none'}", 4, 100)


@pytest.mark.parametrize(
    "spec",
    ["many", "uniform:9:3", "uniform:9", "lognormal:50:40", "lognormal:50:300", "-3", "200", "nan", ""],
)
def test_lengths_that_make_no_sense_are_refused(spec):
    with pytest.raises(ConfigError) as caught:
        lengths("--lengths", spec, 4, 100)
    assert caught.value.field == "--lengths" and str(caught.value.got) == spec
