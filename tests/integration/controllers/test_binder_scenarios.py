"""What Kubernetes was recorded to do with claims and volumes, the binder does too."""

import pytest
from tests.integration.controllers.replay import Scenario, Stage, replay, scenarios


@pytest.mark.parametrize("scenario", scenarios("binder"), ids=lambda scenario: scenario["name"])
async def test_the_recorded_outcome_of_binding(stage: Stage, scenario: Scenario) -> None:
    differences = await replay(stage, scenario, ("binder", "protection"))
    assert not differences, "\n".join(differences)


@pytest.mark.parametrize("scenario", scenarios("expansion"), ids=lambda scenario: scenario["name"])
async def test_the_recorded_outcome_of_growing_and_guarding(stage: Stage, scenario: Scenario) -> None:
    differences = await replay(stage, scenario, ("binder", "expansion", "protection"))
    assert not differences, "\n".join(differences)
