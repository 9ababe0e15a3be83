"""Plans that fetch and evict the weights of models, carried out by the executor."""

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import torch
from execute_builders import GREEDY, HandScheduler, make_model, make_prompt, tiny_config, with_forward
from weight_builders import AMPLE, image_of, moves, next_arrival

from at_hand import on_cpu
from crossed import each_nth
from image_caches import use_image_cache
from shoal.core import ConfigError, NewSequence, Service, StepPlan
from shoal.execute.model import model_set
from shoal.execute.model.model_set import load_models
from shoal.execute.protocol import StepFailed, WeightsAbsent
from shoal.execute.torch_services import TorchServices
from shoal.execute.weights.image import Place
from shoal.execute.weights.loader import WeightLoader

pytestmark = on_cpu
KINDS = ("llama", "gemma3", "gpt2", "mixtral")
PROMPTS = [make_prompt(9, seed=1), make_prompt(4, seed=2)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Models, and a cache for their images, which are made on first use."""
    folder = tmp_path_factory.mktemp("moves")
    with pytest.MonkeyPatch.context() as patch:
        use_image_cache(folder / "cache", patch)
        yield {kind: make_model(folder / kind, tiny_config(kind)) for kind in KINDS}


class MovingHand(HandScheduler):
    """A source of plans whose models' weights come and go."""

    def name_of(self, service: str) -> str:
        return self.models.services[service].weights

    def move(self, *, evict: tuple[str, ...] = (), fetch: tuple[str, ...] = ()) -> None:
        """A plan that moves the weights of these services."""
        names = {
            "evict": [self.name_of(each) for each in evict],
            "fetch": [self.name_of(each) for each in fetch],
        }
        self.executor.submit(moves((evict + fetch)[0], **names))
        self.executor.collect()

    def fetch(self, service: str) -> None:
        """Fetch the weights of a service, and wait for them."""
        self.move(fetch=(service,))
        arrival = next_arrival(self.executor)
        assert (arrival.weights, arrival.error) == (self.name_of(service), None)

    def evict(self, service: str) -> None:
        self.move(evict=(service,))

    def place(self, service: str) -> Place:
        return image_of(self.models.services[service].model).place


@pytest.fixture(params=[1, 2])
def hand(folders: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[MovingHand]:
    hand = MovingHand(folders, depth=request.param, weights_bytes=AMPLE)
    yield hand
    hand.executor.close()


@pytest.mark.parametrize("dtype", each_nth(["float32", "bfloat16", "int8"], 3, at=2))
def test_outputs_stay_the_same_over_many_evictions_and_fetches(folders: dict[str, Path], dtype: str) -> None:
    classic = HandScheduler(folders, dtype=dtype)
    expected = {kind: classic.generate(kind, PROMPTS, 3) for kind in KINDS}
    hand = MovingHand(folders, dtype=dtype, weights_bytes=AMPLE)
    addresses = {kind: _addresses(hand, kind) for kind in KINDS}
    random, resident = Random(0), list[str]()
    for _ in range(40):
        kind = random.choice(KINDS)
        if kind not in resident:
            hand.fetch(kind)
            resident.append(kind)
        assert hand.generate(kind, PROMPTS, 3) == expected[kind]
        if len(resident) > 2 or random.random() < 0.3:
            hand.evict(resident.pop(random.randrange(len(resident))))
    assert {kind: _addresses(hand, kind) for kind in KINDS} == addresses
    hand.executor.close()


def _addresses(hand: MovingHand, service: str) -> list[int]:
    return [parameter.data_ptr() for parameter in hand.models.services[service].model.module.parameters()]


def test_nothing_is_in_memory_before_a_plan_fetches_it(hand: MovingHand) -> None:
    assert {hand.place(kind) for kind in KINDS} == {Place.ABSENT}
    assert hand.executor.arrivals() == []
    with pytest.raises(WeightsAbsent, match="service 'llama', whose weights are absent"):
        hand.generate("llama", PROMPTS, 1)


def test_a_step_of_weights_that_left_is_an_error(hand: MovingHand) -> None:
    hand.fetch("llama")
    hand.generate("llama", PROMPTS, 2)
    hand.evict("llama")
    with pytest.raises(WeightsAbsent):
        hand.generate("llama", PROMPTS, 2)


def test_a_plan_evicts_before_it_fetches(hand: MovingHand) -> None:
    hand.fetch("llama")
    hand.move(evict=("llama",), fetch=("llama",))
    assert next_arrival(hand.executor).error is None


def test_weights_move_in_a_plan_behind_one_that_failed(
    hand: MovingHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand.fetch("llama")

    def fail(*arguments: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    services = hand.models.services
    monkeypatch.setitem(services, "llama", with_forward(services["llama"], fail))
    hand.executor.submit(_prefill(hand, "llama"))
    hand.executor.submit(moves("gpt2", fetch=[hand.name_of("gpt2")], evict=[]))
    with pytest.raises(StepFailed):
        hand.executor.collect()
    with suppress(StepFailed):
        hand.executor.collect()
    assert next_arrival(hand.executor).weights == hand.name_of("gpt2")


def _prefill(hand: MovingHand, service: str, number: int = 900) -> StepPlan:
    """A plan of a whole prompt."""
    prompt, blocks = PROMPTS[0], hand.blocks(service, 40)
    joined = NewSequence(number, prompt, len(prompt), 0, blocks, GREEDY, 0)
    return StepPlan(
        number=0,
        service=service,
        seq_ids=(number,),
        new_tokens=(len(prompt),),
        sampled=(0,),
        joined=(joined,),
    )


def _decodes(service: str, iterations: int, number: int) -> StepPlan:
    """A plan of several decodes behind ``_prefill``."""
    return StepPlan(
        number=0, service=service, seq_ids=(number,), new_tokens=(1,), sampled=(0,), iterations=iterations
    )


def test_an_arrival_ends_the_iterations_of_a_plan(hand: MovingHand) -> None:
    hand.fetch("llama")
    for number in (900, 901):
        hand.executor.submit(_prefill(hand, "llama", number))
        hand.executor.collect()
    hand.executor.submit(_decodes("llama", 5, 900))
    assert len(hand.executor.collect().tokens) == 5
    hand.move(fetch=("gpt2",))
    weights = hand.models.weights
    assert weights is not None
    while not weights.arrived:
        pass
    hand.executor.submit(_decodes("llama", 5, 901))
    assert len(hand.executor.collect().tokens) == 1
    assert next_arrival(hand.executor).weights == hand.name_of("gpt2")


def test_steps_compute_the_same_while_other_weights_come(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def wait(seconds: float) -> bool:
        reached.set()
        go_on.wait(60)
        return False

    hand = MovingHand(folders, weights_bytes=AMPLE)
    hand.fetch("llama")
    expected = hand.generate("llama", PROMPTS, 5)
    assert hand.models.weights is not None
    monkeypatch.setattr(hand.models.weights, "_loader", WeightLoader(1.0, wait=wait))
    hand.move(fetch=("gpt2",))
    assert reached.wait(60)
    assert hand.place("gpt2") is Place.COMING
    assert hand.generate("llama", PROMPTS, 5) == expected
    assert hand.executor.arrivals() == []
    go_on.set()
    assert next_arrival(hand.executor).weights == hand.name_of("gpt2")
    hand.executor.close()


def test_a_failed_fetch_leaves_the_weights_absent(hand: MovingHand) -> None:
    file = image_of(hand.models.services["llama"].model).weights_file
    content = file.read_bytes()
    os.truncate(file, 100)
    hand.move(fetch=("llama",))
    assert "has 100 bytes" in (next_arrival(hand.executor).error or "")
    assert hand.place("llama") is Place.ABSENT
    file.write_bytes(content)
    hand.fetch("llama")
    hand.generate("llama", PROMPTS, 1)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"evict": ["gpt2"]}, "to be evicted that are absent"),
        ({"fetch": ["llama"]}, "to be fetched that are resident"),
    ],
)
def test_moves_that_cannot_be_are_errors(hand: MovingHand, how: dict[str, list[str]], message: str) -> None:
    hand.fetch("llama")
    hand.executor.submit(moves("llama", **{key: [hand.name_of(*names)] for key, names in how.items()}))
    with pytest.raises(RuntimeError, match=message):
        hand.executor.collect()


def test_unknown_weights_are_an_error(hand: MovingHand) -> None:
    hand.executor.submit(moves("llama", fetch=["nothing"]))
    with pytest.raises(RuntimeError, match="no service has the weights nothing"):
        hand.executor.collect()


def test_without_a_budget_nothing_moves(folders: dict[str, Path]) -> None:
    hand = HandScheduler(folders)
    assert hand.executor.arrivals() == ()
    assert all(model.image is None for model in hand.models.models)
    hand.executor.submit(moves("llama", fetch=[hand.models.services["llama"].weights]))
    with pytest.raises(RuntimeError, match="all of them stay in memory"):
        hand.executor.collect()


def test_services_on_the_same_weights_share_them(folders: dict[str, Path]) -> None:
    hand = MovingHand({"a": folders["llama"], "b": folders["llama"]}, weights_bytes=AMPLE)
    assert hand.name_of("a") == hand.name_of("b")
    assert hand.models.weight_bytes == image_of(hand.models.services["a"].model).num_bytes
    hand.fetch("a")
    hand.generate("b", PROMPTS, 1)
    hand.executor.remove_service("a")
    hand.generate("b", PROMPTS, 1)
    hand.executor.close()


def test_a_service_that_is_removed_gives_its_memory_back(hand: MovingHand) -> None:
    hand.fetch("llama")
    removed, weights = hand.name_of("llama"), hand.models.services["llama"].model.module.lm_head.weight
    assert weights.any()
    TorchServices(hand.models, hand.executor).remove("llama")
    assert not weights.any()
    hand.executor.submit(moves("gpt2", fetch=[removed]))
    with pytest.raises(RuntimeError, match="no service has"):
        hand.executor.collect()


def test_a_service_is_added_with_its_weights_absent(folders: dict[str, Path], tmp_path: Path) -> None:
    hand = MovingHand({"llama": folders["llama"]}, weights_bytes=AMPLE)
    services = TorchServices(hand.models, hand.executor)
    hand.executor.remove_service("llama")
    model = services.load(Service(name="llama", model="other", dtype="float32"), folders["llama"])
    services.add(Service(name="llama", model="other"), model)
    assert hand.place("llama") is Place.ABSENT
    hand.fetch("llama")
    hand.generate("llama", PROMPTS, 1)
    hand.executor.close()


def test_weights_that_the_machine_cannot_hold_are_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    services = [Service(name="a", model="a", dtype="float32")]
    monkeypatch.setattr(model_set, "free_bytes", lambda device: 1000)
    with pytest.raises(ConfigError, match=r"weights.memory: weights would take .* are free"):
        load_models(services, {"a": folders["llama"]}, weights_bytes=AMPLE)


def test_weights_come_and_go_on_linux_only(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_set.sys, "platform", "darwin")
    services = [Service(name="a", model="a", dtype="float32")]
    with pytest.raises(ConfigError, match=r"weights\.memory: .* on Linux only, and this is darwin"):
        load_models(services, {"a": folders["llama"]}, weights_bytes=AMPLE)


def test_memory_for_kv_is_what_weights_leave(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    services = [Service(name="a", model="a", dtype="float32")]
    models = load_models(services, {"a": folders["llama"]}, weights_bytes=AMPLE)
    monkeypatch.setattr(model_set, "free_bytes", lambda device: models.weight_bytes + 1000)
    assert models.default_kv_bytes() == 400
    models.check_kv_bytes(1000)
    with pytest.raises(ConfigError, match="beside the weights"):
        models.check_kv_bytes(1001)
