"""One thread a process: the problems here are small, and threads that wait for each other are slower than one."""

import fedbilevel  # noqa: F401, I001  (first: it says how torch's threads wait)
import torch

torch.set_num_threads(1)
