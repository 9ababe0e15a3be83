"""Modules of a model are replaced as a rule says, and put back."""

from torch import nn

from shoal.execute.model.replace import Place, places, put_back, replace_modules


def make_model() -> nn.Sequential:
    """Two layers, the second of which is used twice."""
    shared = nn.Linear(2, 2)
    return nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(2, 2), shared), nn.Sequential(shared))


def identity_for_linear(place: Place) -> nn.Module | None:
    return nn.Identity() if isinstance(place.module, nn.Linear) else None


def test_places_have_the_paths_of_modules() -> None:
    model = make_model()
    found = places(model)
    assert [place.path for place in found] == ["0", "1", "2", "1.0", "1.1", "2.0"]
    assert all(place.module is model.get_submodule(place.path) for place in found)


def test_every_place_of_a_module_gets_a_replacement_and_the_original_back() -> None:
    model = make_model()
    before = {place: place.module for place in places(model)}
    originals = replace_modules(model, identity_for_linear)
    assert [place.path for place in originals] == ["1.0", "1.1", "2.0"]
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    put_back(originals)
    assert all(place.module is module for place, module in before.items())


def test_parts_of_a_replaced_module_come_back_with_it() -> None:
    model = make_model()
    before = {place: place.module for place in places(model)}
    originals = replace_modules(model, lambda _: nn.Identity())
    assert [type(child) for child in model] == [nn.Identity] * 3
    put_back(originals)
    assert all(place.module is module for place, module in before.items())
