from typing import Any

import pytest

from sb3_per.trees import RankTree, SumTree


@pytest.fixture(params=[SumTree, RankTree])
def kind(request: pytest.FixtureRequest) -> Any:
    """Both trees, one after the other."""
    return request.param
