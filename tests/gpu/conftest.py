"""The CUDA twins of the CPU tests; collected only where there is a CUDA device."""

from __future__ import annotations

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
