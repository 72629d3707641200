"""Many operations with faults and deaths of the controller at seeded moments: after each, all is as promised."""

import asyncio
import random

import pytest

from moeray.comm.errors import StartupError
from moeray.elastic.view import RebalanceRequest, ScaleRequest
from tests.support.deployment import Deployment
from tests.support.fake_cluster import NUM_LAYERS, Fault, die, error, hang

NUM_OPERATIONS = 18
NUM_EXPERTS = 11
JOINER_CALLS = ("created", "load", "connect", "transfer")
SURVIVOR_CALLS = ("host_store", "connect", "transfer", "hand_over")


def wish(random_: random.Random, deployment: Deployment, operation_id: str) -> ScaleRequest:
    serving = deployment.serving()
    retire = tuple(random_.sample(serving, random_.randint(1, len(serving) - 1))) if len(serving) > 1 else ()
    if retire and random_.random() < 0.4:
        return ScaleRequest(retire=retire, operation_id=operation_id)
    return ScaleRequest(workers=random_.randint(1, 5), operation_id=operation_id)


def skew(random_: random.Random, deployment: Deployment) -> None:
    """Whoever serves has counted other experts than before."""
    deployment.cluster.loads = {
        slot: tuple(tuple(random_.randrange(100) ** 2 for _ in range(NUM_EXPERTS)) for _ in range(NUM_LAYERS))
        for slot in range(5)
    }


async def begin(random_: random.Random, deployment: Deployment, operation_id: str) -> None:
    if random_.random() < 0.4:
        skew(random_, deployment)
        await deployment.manager.rebalance(RebalanceRequest(operation_id=operation_id))
    else:
        await deployment.manager.scale(wish(random_, deployment, operation_id))


def set_fault(random_: random.Random, deployment: Deployment) -> None:
    """A member of the group may hang or fail, and not die: that is not an operation's matter."""
    slot = random_.randrange(5)
    kinds: list[Fault] = [hang, error(StartupError("no luck"))]
    if slot in deployment.serving():
        deployment.cluster.fail(slot, random_.choice(SURVIVOR_CALLS), random_.choice(kinds))
    else:
        deployment.cluster.fail(slot, random_.choice(JOINER_CALLS), random_.choice([*kinds, die]))


async def storm(seed: int) -> list[str | None]:
    random_ = random.Random(seed)
    deployment = await Deployment(num_workers=3, max_workers=5, num_spares=seed % 2, num_experts=NUM_EXPERTS).serve()
    outcomes: list[str | None] = []
    for index in range(NUM_OPERATIONS):
        if random_.random() < 0.5:
            set_fault(random_, deployment)
        before = (deployment.view().epoch, deployment.view().placement, deployment.serving())
        try:
            await begin(random_, deployment, str(index))
        except ValueError:
            outcomes.append(None)
            continue
        if random_.random() < 0.4:
            for _ in range(random_.randrange(200)):
                await asyncio.sleep(0)
            await deployment.restart()
        view = await deployment.ended(str(index))
        outcomes.append(view.outcome)
        assert view.outcome in ("done", "rolled_back"), view
        deployment.cluster.heal()
        await deployment.settled()
        if view.outcome == "rolled_back":
            assert (deployment.view().epoch, deployment.view().placement, deployment.serving()) == before
        elif view.from_epoch != view.to_epoch:
            assert deployment.view().epoch == view.to_epoch
            assert tuple(deployment.serving()) == view.targets
    await deployment.stop()
    return outcomes


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_it_is_done_or_it_never_was(seed: int) -> None:
    outcomes = asyncio.run(storm(seed))
    assert "done" in outcomes
