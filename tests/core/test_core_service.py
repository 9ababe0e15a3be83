import msgspec
import pytest

from shoal.core import SLO, Service, service_problem


def service(**fields):
    return Service(name="s", model="m", **fields)


@pytest.mark.parametrize(
    ("fields", "seed"),
    [({}, None), ({"weights": "random"}, 0), ({"weights": "random", "weights_seed": 2**63 - 1}, 2**63 - 1)],
)
def test_valid_weights(fields, seed):
    assert service_problem(service(**fields)) is None
    assert service(**fields).random_seed == seed
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(service(**fields)), type=Service) == service(
        **fields
    )


def test_pacing_needs_a_goal():
    key, wrong = service_problem(service(pace=True, slo=SLO(ttft_s=1)))
    assert key == "pace"
    assert "write slo.tpot" in wrong
    assert service_problem(service(pace=True, slo=SLO(tpot_s=1))) is None


@pytest.mark.parametrize(
    ("fields", "key", "wrong"),
    [
        ({"weights": "dummy"}, "weights", "must be one of files, random, got 'dummy'"),
        ({"weights": "random", "weights_seed": -1}, "weights_seed", "must be at least 0"),
        ({"weights": "random", "weights_seed": 2**63}, "weights_seed", "at most"),
        ({"weights_seed": 1}, "weights_seed", "is of random weights only: write weights: random"),
    ],
)
def test_invalid_weights(fields, key, wrong):
    found = service_problem(service(**fields))
    assert found is not None
    assert found[0] == key
    assert wrong in found[1]
