"""One pool of processes for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session", name="pool")
def _pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(tmp_path_factory.mktemp("pool"))
    yield pool
    pool.stop()
