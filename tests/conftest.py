import numpy as np
import pytest
import torch as th

# Small networks run slower on several threads, above all beside other test workers
th.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_random_numbers_whatever_ran_before() -> None:
    np.random.seed(0)
    th.manual_seed(0)
