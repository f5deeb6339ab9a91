"""A CNN on images, trained by nodes that average with random peers, with dpwa's two calls.

What it shows: the training loop of dpwa. Nodes and settings come from a file in its format. Each
node trains on its own images, and all are tested on the same ones. The images are made here:
shifted patterns of ten classes, with noise.

Run it: python examples/dpwa/cluster.py (all nodes, on this machine)
One node, on any machine: python examples/dpwa/train.py w1 CONFIG.yaml
"""

import signal
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_loco import PairwiseEngine

CLASSES, STEPS, BATCH_SIZE = 10, 300, 32


def make_images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    patterns = torch.randn(CLASSES, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    shifts = torch.randint(-2, 3, (count, 2), generator=generator).tolist()
    images = torch.stack(
        [torch.roll(patterns[k], by, (1, 2)) for k, by in zip(labels, shifts, strict=True)]
    )
    return images + 2 * torch.randn(images.shape, generator=generator), labels


def make_net() -> nn.Module:
    torch.manual_seed(0)  # all nodes start from the same parameters
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, CLASSES)),
    )


def main(name: str, config_file: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends all nodes, without a traceback
    torch.set_num_threads(1)
    net = make_net()
    engine = PairwiseEngine.from_file(net, config_file, name)
    own_seed = 1 + engine.settings.node_number
    images, labels = make_images(2048, own_seed)
    test_images, test_labels = make_images(1024, 0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    generator = torch.Generator().manual_seed(own_seed)
    loss, blends = None, 0
    for step in range(1, STEPS + 1):
        batch = torch.randint(len(labels), (BATCH_SIZE,), generator=generator)
        engine.update_send(loss)  # serve the present parameters, start to fetch a peer's
        optimizer.zero_grad()
        result = cross_entropy(net(images[batch]), labels[batch])
        result.backward()
        optimizer.step()
        loss = result.item()
        blends += engine.update_wait(loss) > 0  # wait for the peer's parameters, average with them
        if step % 50 == 0:
            print(f"{name}: step {step}, loss {loss:.2f}, {blends} averages", flush=True)
    net.eval()
    with torch.no_grad():
        right = (net(test_images).argmax(1) == test_labels).float().mean()
    engine.close()
    print(f"{name}: {right:.0%} of the test images are recognized", flush=True)


if __name__ == "__main__":
    default = Path(__file__).with_name("config.yaml")
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else str(default))
