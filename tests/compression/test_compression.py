"""The ``compression=`` setting, the residual of error feedback, and the reference of parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_loco.compression import (
    CODECS,
    E3M0,
    BFloat16,
    Compensated,
    Compression,
    ErrorFeedback,
    Int8,
    Sparse,
    as_compression,
)


class DenseMeanOfSenders(Int8):
    averages_senders = True


def test_names_make_codecs_that_fit_the_exchange(subtests: pytest.Subtests) -> None:
    for name, kind in CODECS.items():
        with subtests.test(name):
            codec = kind()
            expected = Compression(codec, 1.0 if codec.is_rough else None)
            assert as_compression(name, "mean", False) == expected
            if not codec.is_rough:
                assert as_compression(name, "neighbors", True) == Compression(codec)


def test_codecs_and_error_feedback_objects_are_accepted() -> None:
    assert as_compression(Int8(4), "mean", False) == Compression(Int8(4))
    assert as_compression(E3M0(8), "mean", False) == Compression(E3M0(8), 1.0)
    assert as_compression(ErrorFeedback(E3M0(), 0.0), "mean", False) == Compression(E3M0())
    given = ErrorFeedback(Sparse(), 0.95)
    assert as_compression(given, "mean", True) == Compression(Sparse(), 0.95, is_relative=True)


def test_compensated_keeps_the_lost_part_in_the_model_with_the_sign_of_the_message() -> None:
    for sends_parameters, expected in ((False, [9.0, 22.0]), (True, [11.0, 18.0])):
        compression = as_compression(Compensated(Sparse()), "mean", sends_parameters)
        assert compression is not None
        assert compression.has_feedback
        state = compression.init(torch.zeros(2))
        message = torch.tensor([3.0, 4.0])
        compression.prepare_message(message, state)
        assert message.tolist() == [3.0, 4.0]
        compression.update_residual(torch.tensor([1.0, -2.0]), state, was_prepared=True)
        result = torch.tensor([10.0, 20.0])
        assert compression.local_params(result, state).tolist() == expected
        assert compression.local_params(result, state, out=result) is result
        assert result.tolist() == expected
        message.zero_()
        compression.prepare_message(message, state)
        assert message.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("given", [None, "none"])
def test_none_means_no_compression(given: Any) -> None:
    assert as_compression(given, "mean", False) is None


def test_unsupported_combinations_are_refused(subtests: pytest.Subtests) -> None:
    for given, exchange, error, words in (
        ("zip", "mean", ValueError, "one of none, bf16, fp16, int8, int4, e3m0, sparse"),
        (8, "mean", TypeError, "a codec such as Int8"),
        (Compensated(Int8()), "neighbors", ValueError, "without an error feedback"),
        (Compensated(Int8()), "pull", ValueError, "Pulls take no error feedback.*codec alone"),
        ("sparse", "neighbors", ValueError, "too roughly for gossip"),
        ("e3m0", "neighbors", ValueError, "too roughly for gossip"),
        (ErrorFeedback(Int8()), "neighbors", ValueError, "without an error feedback"),
        ("int4", "pull", ValueError, "too roughly for gossip"),
        (ErrorFeedback(Int8()), "pull", ValueError, "Pulls take no error feedback.*codec alone"),
        (Sparse(mean_over="senders"), "neighbors", ValueError, "averages over all workers"),
        (Compensated(Sparse(mean_over="senders")), "mean", ValueError, "and an error feedback"),
        (ErrorFeedback(Sparse(mean_over="senders"), 0), "mean", ValueError, "an error feedback"),
        (DenseMeanOfSenders(), "mean", ValueError, "only a sparse codec can"),
    ):
        with subtests.test(given=given, exchange=exchange), pytest.raises(error, match=words):
            as_compression(given, exchange, False)


def test_invalid_error_feedback_is_refused(subtests: pytest.Subtests) -> None:
    for codec, decay, error in (
        ("int8", 1.0, TypeError),
        (Int8(), 1.1, ValueError),
        (Int8(), -0.1, ValueError),
        (Int8(), True, TypeError),
        (Int8(), float("nan"), ValueError),
    ):
        with subtests.test(codec=codec, decay=decay), pytest.raises(error):
            ErrorFeedback(codec, decay)


@pytest.mark.parametrize("decay", [1.0, 0.5, 0.0])
def test_sent_plus_residual_equals_message_plus_decayed_residual(decay: float) -> None:
    compression = Compression(E3M0(8), decay)
    state = compression.init(torch.zeros(40, dtype=torch.float64))
    for seed in range(5):
        message = torch.randn(
            40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        before = state["residual"].clone()
        wanted = message.clone()
        compression.prepare_message(wanted, state)
        assert torch.equal(wanted, message + decay * before)
        assert torch.equal(state["residual"], before)
        sent = compression.codec.decode(compression.codec.encode(wanted), torch.empty_like(wanted))
        compression.update_residual(wanted - sent, state, was_prepared=True)
        torch.testing.assert_close(
            sent + state["residual"], message + decay * before, rtol=0, atol=1e-15
        )


def test_a_worker_without_progress_keeps_its_residual_and_adds_that_of_its_sums() -> None:
    compression = Compression(Int8(4), 1.0)
    state = {"residual": torch.tensor([1.0, 2.0])}
    compression.update_residual(torch.tensor([0.0, 0.5]), state, was_prepared=False)
    assert state["residual"].tolist() == [1.0, 2.5]


def test_parameters_are_sent_as_differences_to_the_reference() -> None:
    compression = Compression(BFloat16(), None, is_relative=True)
    start = torch.tensor([100.0, 200.0])
    state = compression.init(start)
    message = torch.tensor([101.0, 198.0])
    compression.prepare_message(message, state)
    assert message.tolist() == [1.0, -2.0]
    compression.add_reference(message, state)
    compression.update_reference(message, state)
    assert state["reference"].tolist() == [101.0, 198.0]
    assert start.tolist() == [100.0, 200.0]
