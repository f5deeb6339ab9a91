"""Parameters that move within a module are found; one that is gone is named."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_loco.parameters.owners import ParameterOwners


def test_a_parameter_that_moves_is_found_and_one_that_is_gone_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    weight = model[1].weight
    places = ParameterOwners(model, ["1.weight"], [weight])
    assert places.found == [(model[1], "weight", weight)]
    del model[1].weight
    model[0].other = weight
    places.check()
    assert places.found == [(model[0], "other", weight)]
    model[0].other = nn.Parameter(weight.detach().clone())
    with pytest.raises(RuntimeError, match=r"Parameter '1.weight' was replaced by another object"):
        places.check()
