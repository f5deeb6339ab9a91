"""The demo data: equal on every worker, split by position, divided without overlap."""

from __future__ import annotations

import gzip
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler

from lightning_loco.app.demo.data import ByteTextData, Windows, standard_library, text_file


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Return a text whose bytes identify their position."""
    file = tmp_path / "text.bin"
    numbers = (divmod(number, 255) for number in range(2000))
    file.write_bytes(b"".join(bytes((high + 1, low + 1)) for high, low in numbers))
    return file


def ready(path: Path, num_workers: int = 1, **changes: object) -> ByteTextData:
    settings = {"batch_size": 2, "context": 10, "val_fraction": 0.1, "val_bytes": 200}
    data = ByteTextData(path=path, **{**settings, **changes})
    data.check(num_workers)
    return data


def test_the_standard_library_is_real_and_reproducible_text() -> None:
    first, second = standard_library(300_000), standard_library(300_000)
    assert len(first) == 300_000
    assert np.array_equal(first, second)
    assert b"import " in first.tobytes()
    assert np.array_equal(first[:1000], standard_library(1000))


def test_the_default_text_is_large() -> None:
    assert len(standard_library(20_000_000)) > 5_000_000


def test_missing_torchdata_is_named_before_training(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchdata", None)
    with pytest.raises(ValueError, match=r"needs torchdata.*'\.\[demo\]'"):
        ready(text)


def test_windows_predict_every_byte_once() -> None:
    text = np.arange(32, dtype=np.uint8)
    windows = Windows(text, context=10)
    assert len(windows) == 3
    targets = torch.cat([windows[index][1:] for index in range(3)])
    assert torch.equal(targets, torch.arange(1, 31, dtype=torch.uint8))
    with pytest.raises(IndexError):
        windows[3]


def test_number_of_windows(subtests: pytest.Subtests) -> None:
    for length, expected in [(0, 0), (10, 0), (11, 1), (20, 1), (21, 2)]:
        with subtests.test(length=length):
            assert len(Windows(np.zeros(length, dtype=np.uint8), context=10)) == expected


def test_overlapping_windows() -> None:
    windows = Windows(np.arange(21, dtype=np.uint8), context=10, stride=5)
    assert [int(windows[index][0]) for index in range(len(windows))] == [0, 5, 10]


def test_the_end_of_the_text_is_for_validation(text: Path) -> None:
    data = ready(text)
    whole = text.read_bytes()
    train = torch.cat([batch.flatten() for batch in data.train_dataloader()])
    val = [bytes(window.tolist()) for batch in data.val_dataloader() for window in batch]
    assert len(data.train_windows.text) == 3600
    assert all(whole.index(window) >= 3600 for window in val)
    assert len(val) == 20
    assert whole.index(val[0]) == 3600
    assert whole.index(val[-1]) >= 3900
    assert len(train) == 358 // 2 * 2 * 11


def test_validation_is_a_multiple_of_the_workers(text: Path) -> None:
    for num_workers in (1, 3, 7):
        data = ready(text, num_workers)
        assert sum(len(batch) for batch in data.val_dataloader()) % num_workers == 0


def test_workers_get_disjoint_shares(text: Path) -> None:
    data = ready(text)
    windows = data.train_windows
    shares = [
        set(DistributedSampler(windows, num_replicas=3, rank=rank, drop_last=True))
        for rank in range(3)
    ]
    starts = [{bytes(windows[index][:4].tolist()) for index in share} for share in shares]
    assert starts[0].isdisjoint(starts[1])
    assert starts[0].isdisjoint(starts[2])
    assert starts[1].isdisjoint(starts[2])
    assert min(map(len, starts)) >= len(windows) // 3


def order(data: ByteTextData, epoch: int, skip: int = 0) -> list[torch.Tensor]:
    loader = data.train_dataloader()
    loader.sampler.set_epoch(epoch)
    return list(loader)[skip:]


def test_the_order_depends_on_seed_and_epoch_only(text: Path) -> None:
    first = order(ready(text), 0)
    torch.manual_seed(7)
    assert torch.equal(torch.stack(first), torch.stack(order(ready(text), 0)))
    assert not torch.equal(torch.stack(first), torch.stack(order(ready(text), 1)))
    assert not torch.equal(torch.stack(first), torch.stack(order(ready(text, seed=5), 0)))


@pytest.mark.parametrize("epoch", [0, 2])
def test_resume_continues_at_the_next_batch(text: Path, epoch: int) -> None:
    loader = ready(text).train_dataloader()
    loader.sampler.set_epoch(epoch)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = loader.state_dict()

    resumed = ready(text).train_dataloader()
    resumed.load_state_dict(state)
    iterator = iter(resumed)
    resumed.sampler.set_epoch(epoch)  # Lightning's order: the epoch after the iterator
    expected = order(ready(text), epoch, skip=5)
    assert torch.equal(torch.stack(list(iterator)), torch.stack(expected))
    assert len(list(resumed)) == len(resumed)


def test_a_resumed_loader_has_its_state_before_it_starts(text: Path) -> None:
    loader = ready(text).train_dataloader()
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    resumed = ready(text).train_dataloader()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state


def test_no_state_before_and_after_an_epoch(text: Path) -> None:
    loader = ready(text).train_dataloader()
    assert loader.state_dict() == {}
    iterator = iter(loader)
    for _ in range(len(loader)):
        next(iterator)
    assert loader.state_dict() == {}


def test_loader_state_can_be_loaded_safely(text: Path, tmp_path: Path) -> None:
    loader = ready(text).train_dataloader()
    next(iter(loader))
    torch.save(loader.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == loader.state_dict()


def test_settings_out_of_range_are_refused(subtests: pytest.Subtests) -> None:
    for name, value, message in [
        ("batch_size", 0, "data.batch_size must be at least 1, got 0"),
        ("context", 0, "data.context must be at least 1, got 0"),
        ("val_fraction", 1.0, "between 0 and 1, got 1.0"),
        ("num_workers", -1, "data.num_workers must be at least 0, got -1"),
    ]:
        with subtests.test(name), pytest.raises(ValueError, match=message):
            ByteTextData(**{name: value})


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is none at .*nowhere.txt"):
        text_file(tmp_path / "nowhere.txt", 100)
    with pytest.raises(ValueError, match="there is none"):
        text_file(tmp_path, 100)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match="empty file: .*empty.txt"):
        text_file(tmp_path / "empty.txt", 100)


def test_what_is_no_text_is_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    file = tmp_path / "text"
    for name, content in {
        "gzip": gzip.compress(b"To be, or not to be", mtime=1),
        "zip": b"PK\x03\x04\x14\x00",
        "numbers": bytes(20_000),
        "UTF-16": "To be, or not to be".encode("utf-16"),
    }.items():
        file.write_bytes(content)
        with subtests.test(name), pytest.raises(ValueError, match="no text in UTF-8.*gzip -d"):
            text_file(file, 100)
    for several in ([str(file)], 5):
        with subtests.test(several), pytest.raises(ValueError, match="must name one file, got"):
            ByteTextData(path=several).check(1)  # type: ignore[arg-type]
    file.write_bytes("\ufeffé 数据\r\n\t\x1b[0m".encode())
    assert text_file(file, 5).tobytes() == b"\xef\xbb\xbf\xc3\xa9"


def test_a_text_too_small_for_the_ranks_is_refused(text: Path) -> None:
    ready(text, num_workers=4, batch_size=80)
    with pytest.raises(ValueError, match="4 ranks needs 400 and 4. Take a longer text"):
        ready(text, num_workers=4, batch_size=100)
    with pytest.raises(ValueError, match="39 validation windows"):
        ready(text, num_workers=50)


def test_loaders_need_setup() -> None:
    with pytest.raises(RuntimeError, match="setup"):
        ByteTextData().train_dataloader()


def test_unused_data_is_picklable(text: Path) -> None:
    data = pickle.loads(pickle.dumps(ByteTextData(path=text, context=10, batch_size=2)))
    data.check(1)
    assert len(data.train_windows) > 0
