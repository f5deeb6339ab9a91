"""The demo model: shapes, causality, the schedule, generation."""

from __future__ import annotations

import math

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_loco.app.demo.model import ByteGPT, learning_rate_factor
from tests.harness.small_model import quiet_trainer


def small(**changes: object) -> ByteGPT:
    torch.manual_seed(0)
    settings = {"num_layers": 2, "num_heads": 2, "width": 16, "context": 12, "total_steps": 100}
    return ByteGPT(**{**settings, **changes})


def test_defaults_have_about_0_8_million_parameters() -> None:
    assert 800_000 < sum(p.numel() for p in ByteGPT().parameters()) < 900_000


def test_logits_have_one_column_per_byte() -> None:
    assert small()(torch.zeros(3, 7, dtype=torch.long)).shape == (3, 7, 256)


def test_predictions_are_causal() -> None:
    model = small().eval()
    text = torch.randint(0, 256, (1, 12))
    changed = text.clone()
    changed[0, 8] = (text[0, 8] + 1) % 256
    before, after = model(text), model(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert (before[:, 8:] - after[:, 8:]).abs().amax(-1).gt(0).all()


def test_a_new_model_predicts_uniformly() -> None:
    windows = torch.randint(0, 256, (8, 13), dtype=torch.uint8)
    assert small().loss(windows).item() == pytest.approx(math.log(256), rel=0.02)


def test_the_loss_is_the_cross_entropy_of_the_next_byte() -> None:
    model = small()
    windows = torch.randint(0, 256, (2, 6), dtype=torch.uint8)
    log_p = model(windows[:, :-1].long()).log_softmax(-1)
    terms = [-log_p[b, t, int(windows[b, t + 1])] for b in range(2) for t in range(5)]
    torch.testing.assert_close(model.loss(windows), torch.stack(terms).mean())


def test_the_head_is_the_embedding() -> None:
    model = small()
    assert model.head.weight is model.embedding.weight
    assert sum("head" in name for name, _ in model.named_parameters()) == 0


def test_only_matrices_have_weight_decay() -> None:
    optimizer = small().configure_optimizers()["optimizer"]
    decayed, kept = optimizer.param_groups
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in kept["params"]} == {1}
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) + len(kept["params"]) == len(list(small().parameters()))


def test_schedule_warms_up_and_ends_at_a_tenth() -> None:
    factors = [learning_rate_factor(step, 10, 100) for step in range(101)]
    assert factors[:10] == [pytest.approx((step + 1) / 10) for step in range(10)]
    assert factors[10] == 1.0
    assert all(later < earlier for earlier, later in zip(factors[10:], factors[11:], strict=False))
    assert factors[100] == pytest.approx(0.1)
    assert learning_rate_factor(1000, 10, 100) == pytest.approx(0.1)
    assert learning_rate_factor(0, 0, 1) == 1.0


def test_the_schedule_has_the_length_of_the_run() -> None:
    model = small(total_steps=None, warmup_steps=0)
    model.trainer = Trainer(accelerator="cpu", max_steps=50, max_epochs=-1, logger=False)
    schedule = model.configure_optimizers()["lr_scheduler"]["scheduler"]
    assert schedule.lr_lambdas[0](25) == pytest.approx(0.55)
    assert schedule.lr_lambdas[0](50) == pytest.approx(0.1)


def test_a_schedule_without_an_end_is_refused() -> None:
    model = small(total_steps=None)
    model.trainer = Trainer(accelerator="cpu", max_epochs=-1, logger=False)
    with pytest.raises(ValueError, match="no end. Set trainer.max_steps"):
        model.configure_optimizers()


def test_generate_is_reproducible_with_a_seed() -> None:
    model = small()
    text = model.generate(b"def ", 20, seed=3)
    assert len(text) == 20
    assert text == model.generate(b"def ", 20, seed=3)
    assert text != model.generate(b"def ", 20, seed=4)
    assert model.training


def test_generate_without_temperature_takes_the_most_likely_byte() -> None:
    model = small()
    prompt = b"a prompt longer than the context"
    expected = b""
    for _ in range(4):
        seen = torch.tensor([list(prompt + expected)[-12:]])
        expected += bytes([int(model(seen)[0, -1].argmax())])
    assert model.generate(prompt, 4, temperature=0) == expected


def test_a_small_model_learns() -> None:
    model = small(lr=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    windows = torch.tensor([list(b"abcabcabcabca")], dtype=torch.uint8)
    for _ in range(60):
        optimizer.zero_grad()
        model.loss(windows).backward()
        optimizer.step()
    assert model.generate(b"abc", 6, temperature=0) == b"abcabc"


def test_settings_out_of_range_are_refused(subtests: pytest.Subtests) -> None:
    for name, value, message in [
        ("num_layers", 0, "num_layers must be at least 1, got 0"),
        ("width", 15, "multiple of num_heads, got width=15 and num_heads=2"),
        ("dropout", 1.0, r"\[0, 1\), got 1.0"),
        ("lr", 0.0, "must be positive, got 0.0"),
        ("warmup_steps", -1, "warmup_steps must be at least 0, got -1"),
        ("weight_decay", -0.1, "weight_decay must be at least 0, got -0.1"),
        ("total_steps", 0, "total_steps must be at least 1, got 0"),
        ("optimizer", "moun", "optimizer must be one of adamw, muon, got 'moun'"),
    ]:
        with subtests.test(name), pytest.raises(ValueError, match=message):
            small(**{name: value})


def test_generate_refuses_invalid_arguments(subtests: pytest.Subtests) -> None:
    model = small()
    for prompt, count, temperature in [(b"", 1, 1), (b"a", -1, 1), (b"a", 1, -1)]:
        with (
            subtests.test(prompt=prompt, count=count, temperature=temperature),
            pytest.raises(ValueError, match="got"),
        ):
            model.generate(prompt, count, temperature=temperature)


def test_hyper_parameters_are_plain() -> None:
    hparams = small().hparams.values()
    assert all(value is None or type(value) in (int, float, str) for value in hparams)


def test_validation_logs_the_loss_and_the_accuracy_of_the_next_byte() -> None:
    model = small()
    windows = torch.randint(0, 256, (6, 13), dtype=torch.uint8)
    trainer = quiet_trainer()
    (metrics,) = trainer.validate(model, DataLoader(windows, batch_size=4), verbose=False)
    with torch.no_grad():
        hits = model(windows[:, :-1].long()).argmax(-1) == windows[:, 1:]
        loss = model.loss(windows)
    assert metrics["val/loss"] == pytest.approx(loss.item())
    assert metrics["val/accuracy"] == pytest.approx(hits.float().mean().item())
