"""What Kubernetes was recorded to do with attachments, the attach/detach controller does too."""

import pytest
from tests.integration.controllers.replay import Scenario, Stage, replay, scenarios


@pytest.mark.parametrize("scenario", scenarios("attachdetach"), ids=lambda scenario: scenario["name"])
async def test_the_recorded_outcome_of_attaching(stage: Stage, scenario: Scenario) -> None:
    differences = await replay(stage, scenario, ("attachdetach",))
    assert not differences, "\n".join(differences)
