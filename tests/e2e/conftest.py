"""What the tests of the controller's actor share."""

from collections.abc import Callable, Iterator

import pytest

from moeray.deploy.local import LocalRay
from tests.support.ray_deployments import Started, deployments


@pytest.fixture
def start(ray_cluster: LocalRay) -> Iterator[Callable[..., Started]]:
    """Starts a deployment of fake workers; all are stopped at the end of the test."""
    assert ray_cluster.address
    with deployments() as begin:
        yield begin
