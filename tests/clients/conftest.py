"""Small operators on many threads wait for each other more than they compute; the tests use one."""

import torch

torch.set_num_threads(1)
