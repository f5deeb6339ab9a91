"""torchft needs PyTorch 2.7; with an older one nothing of this folder is collected."""

import torch

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7):
    collect_ignore_glob = ["test_*.py"]
