"""A plan as text: the table of options, the chosen one, its command and its arithmetic."""

from __future__ import annotations

import dataclasses
import functools
import math
import textwrap
from typing import Any

from lightning_loco._util.text import format_bytes, format_seconds
from lightning_loco.costs.method_costs import ENCODINGS
from lightning_loco.costs.methods import METHOD_TABLE
from lightning_loco.tools.plan.failures import Failures, Outcome
from lightning_loco.tools.plan.loss import (
    EXPONENT,
    FITTED_PARAMETERS,
    FITTED_SYNC_EVERY,
    FITTED_TOKENS_PER_PARAMETER,
    FITTED_WORKERS,
    MAX_SHORT_DELAY,
    NO_GAP,
    OFFSET,
    SLOPE,
)
from lightning_loco.tools.plan.planner import BACKWARD_SHARE, MIN_ROUNDS, Option, Plan, PlannedRun

_HEADINGS = ("", "H", "parts", "late", "computes", "per round", "in all", "time", "speed")
_START = "On each machine, with one as HOST and the same NAME on all (with GPUs add trainer=gpu):"
_WIDTHS = (28, 4, 6, 5, 10, 11, 10, 10, 9)


def report(plan: Plan) -> str:
    """Return the text that is printed."""
    job = plan.job
    lines = [
        *_head(job),
        "",
        *_table(plan),
        "",
        *_legend(job),
        "",
        f"Recommended: {settings(plan.chosen)}.",
        f"Reason: {plan.reason}.",
    ]
    if (better := plan.better) is not None:
        loss = "" if better.gap == NO_GAP else f", loss {better.gap}"
        lines += [f"Lower loss: {settings(better)}: {format_seconds(better.time_s)}{loss}."]
    for option in plan.faster:
        loss = "but its loss is not known" if option.gap is None else f"loss {option.gap}"
        lines += [f"Faster: {settings(option)}: {format_seconds(option.time_s)}, {loss}."]
    shell, python = commands(plan)
    lines += [
        "",
        _START,
        f"  {shell}",
        "In your own script, started in the same way:",
        f"  {python}",
    ]
    lines += ["", "Arithmetic:"]
    lines += [f"  {title:<18}{text}" for title, text in _arithmetic(job, plan.chosen)]
    return "\n".join(lines)


def _head(job: PlannedRun) -> list[str]:
    slowest, uplink = job.times.slowest_link(), job.links.uplink_mbit_per_s
    shared = f"; uplink of a site: {uplink:g} Mbit/s" if uplink < math.inf else ""
    return [
        f"{format_count(job.num_parameters)} parameters, {job.num_workers:,} workers, "
        f"{format_count(job.tokens)} tokens in all",
        f"a worker: {format_seconds(job.step_s)} for a local step of {job.tokens_per_step:,} "
        f"tokens; slowest link: {slowest.mbit_per_s:g} Mbit/s, {1000 * slowest.latency_s:.3g} ms"
        f"{shared}",
        f"one worker alone would need {format_seconds(job.one_worker_s)}",
    ]


def _table(plan: Plan) -> list[str]:
    widths = zip(_HEADINGS, _WIDTHS, strict=True)
    head = "".join(f"{title:>{width}}" if title else " " * width for title, width in widths)
    return [f"{head}  loss against DDP", *(_row(plan, one) for one in plan.options)]


def _row(plan: Plan, option: Option) -> str:
    speed = plan.job.one_worker_s / option.time_s
    gap = str(option.gap)
    if option.gap == NO_GAP:
        gap = "0"
    elif option.gap is None:
        measured = option.candidate.measured
        gap = "not known" + ("" if measured is None else f"; benchmark {measured:+.1f} %")
    cells = (
        option.candidate.title + (" <-" if option is plan.chosen else ""),
        f"{option.sync_every}",
        f"{option.fragments}",
        f"{option.delay}",
        f"{100 * option.utilisation:.1f} %",
        format_bytes(option.round_bytes),
        format_bytes(option.total_bytes),
        format_seconds(option.time_s),
        f"{speed:.2f}",
    )
    row = f"{cells[0]:<{_WIDTHS[0]}}"
    pairs = zip(cells[1:], _WIDTHS[1:], strict=True)
    return row + "".join(f"{cell:>{width}}" for cell, width in pairs) + f"  {gap}"


def _legend(job: PlannedRun) -> list[str]:
    low, high = (format_count(number) for number in FITTED_PARAMETERS)
    learners = METHOD_TABLE["decoupled_diloco"].defaults
    return [
        f"H: local steps per round, the fewest with which workers compute "
        f"{100 * job.utilisation:g} % of the time;",
        "parts: fragments that are exchanged in turn; late: local steps after which a result is "
        "applied;",
        "per round, in all: what a worker sends; speed: relative to one worker alone. Decoupled "
        "learners",
        f"never wait: H is {learners['sync_every']} or, if links carry less, what they carry.",
        "Loss: expected, and its range, from the scaling law of DiLoCo (arXiv:2503.09799), fitted "
        f"to {low} to",
        f"{high} parameters, {FITTED_WORKERS[0]} to {FITTED_WORKERS[1]} workers, "
        f"H = {FITTED_SYNC_EVERY} and {FITTED_TOKENS_PER_PARAMETER} tokens per parameter, with "
        "tuned learning rates.",
        "* lies outside: an extrapolation. Methods without a law: not known; benchmark: of 0.2M",
        "parameters, 4 workers and 600 local steps, where DiLoCo has "
        f"{METHOD_TABLE['diloco'].gaps['']:+.1f} %.",
    ]


def settings(option: Option) -> str:
    """Return a method and its settings in words."""
    if option.gap == NO_GAP:
        return option.candidate.title
    words = [f"{option.candidate.title}, every {option.sync_every} local steps"]
    if option.fragments > 1:
        words.append(f"{option.fragments} fragments")
    if option.delay:
        words.append(f"applied {_steps(option.delay)} later")
    return ", ".join(words)


def _steps(count: int) -> str:
    return f"{count} local step{'s' if count > 1 else ''}"


# ------------------------------------------------------------------------ what to type


def commands(plan: Plan) -> list[str]:
    """Return what runs the chosen option: a command for each machine, and a Trainer in Python."""
    workers = plan.job.num_workers
    launcher = (
        f"torchrun --nnodes={workers} --nproc-per-node=1 --rdzv-backend=c10d "
        "--rdzv-endpoint=HOST:29500 --rdzv-id=NAME"
    )
    trainer = f"Trainer(strategy={strategy(plan.chosen)}, devices=1, num_nodes={workers})"
    return [f"{launcher} train.py {' '.join(overrides(plan.chosen))}", trainer]


def overrides(option: Option) -> list[str]:
    """Return the overrides of train.py that choose a method and its settings."""
    found = [f"algorithm={option.candidate.method}"]
    if option.candidate.method != "ddp":
        found += [f"algorithm.{name}={value}" for name, value in _arguments(option).items()]
    if option.candidate.compression != "none":
        found.append(f"compression={option.candidate.compression}")
    if option.candidate.compression == "sparse":
        found.append("compression.error_feedback=model")
    return found


def strategy(option: Option, ranks: int = 1) -> str:
    """Return the argument ``strategy`` of a Trainer as Python code.

    Args:
        option: The method and its settings.
        ranks: Ranks of a worker.
    """
    if option.candidate.method == "ddp":
        return '"ddp"'
    arguments = _arguments(option)
    if ranks > 1:
        arguments["replica_size"] = str(ranks)
    if option.candidate.compression == "sparse":
        arguments["compression"] = "Compensated(Sparse())"
    elif option.candidate.compression != "none":
        arguments["compression"] = f'"{option.candidate.compression}"'
    given = ", ".join(f"{name}={value}" for name, value in arguments.items())
    return f"{METHOD_TABLE[option.candidate.method].strategy_name}({given})"


SPARSE_OUTER = {"outer_lr": "1.5", "outer_momentum": "0.5"}  # with which its gap was measured


def _arguments(option: Option) -> dict[str, str]:
    """Return the arguments of the strategy that are not its defaults."""
    arguments = {"sync_every": f"{option.sync_every}"}
    if option.fragments > 1 or option.delay:
        arguments |= {"fragments": f"{option.fragments}", "delay": f"{option.delay}"}
    if option.candidate.compression == "sparse":
        arguments |= SPARSE_OUTER
    return arguments


# -------------------------------------------------------------------------- failures


def failures_report(job: PlannedRun, failures: Failures, outcomes: list[Outcome]) -> str:
    """Return the table of what failures cost."""
    width = max(len(one.title) for one in outcomes)
    headings = ["goodput", "formula", "waiting", "joining", "lost", "restarts", "1B tokens", "cost"]
    shown = headings if failures.price is not None else headings[:-1]
    lines = [" " * width + "".join(f"{heading:>11}" for heading in shown)]
    for one in outcomes:
        goodput, *others = one.shares
        cells = [f"{100 * share:.2f} %" for share in (goodput, one.expected, *others)]
        is_finite = one.billion_tokens_s < math.inf
        cells.append(format_seconds(one.billion_tokens_s) if is_finite else "never")
        if one.cost is not None:
            cells.append(f"{one.cost:,.2f}" if is_finite else "-")
        lines.append(f"{one.title:<{width}}" + "".join(f"{cell:>11}" for cell in cells))
    error = max(100 * one.error for one in outcomes)
    every_s = failures.mtbf_s / job.num_workers
    head = (
        f"Failures: a worker fails every {failures.mtbf_h:g} h, so one of {job.num_workers:,} "
        f"every {format_seconds(every_s)}; a restart takes {format_seconds(failures.restart_s)}, a "
        f"checkpoint {format_seconds(failures.checkpoint_s)}"
    )
    legend = (
        "every: all start again from the last checkpoint, after so many seconds each, or the best "
        "number; elastic: the others go on without the one that failed; decoupled learners do not "
        "notice it. goodput: share of the workers' time in local steps whose progress counts, "
        f"simulated, with a standard error of up to {error:.2g} points; formula: the same in "
        "closed form. The rest of the time is waiting (for exchanges, checkpoints, others), "
        "joining, lost or restarts."
    )
    wrap = functools.partial(textwrap.wrap, width=100)
    return "\n".join([*wrap(head), "", *lines, "", *wrap(legend)])


# ------------------------------------------------------------------------- arithmetic


def _arithmetic(job: PlannedRun, option: Option) -> list[tuple[str, str]]:
    """Return the arithmetic from the job to the numbers of an option, line by line."""
    n, steps = job.num_workers, job.steps
    parts = f" / {option.fragments} fragments" if option.fragments > 1 else ""
    rows = [
        (
            "local steps",
            f"{job.tokens:,} tokens / ({n} workers x {job.tokens_per_step:,}) = {steps:,}",
        ),
        ("message", f"{job.num_parameters:,} values{parts}, {_encoding(job, option)}"),
        ("sent per exchange", _sent(job, option)),
        ("exchange", _exchange(job, option)),
    ]
    total = f"{steps:,} x {option.step_s:.4g} s = {format_seconds(option.time_s)}"
    if option.candidate.method == "ddp":
        hidden = BACKWARD_SHARE * job.step_s
        waiting = max(0.0, option.exchange_s - hidden)
        rows += [
            ("hidden", f"behind the backward pass, 2/3 of a step: up to {hidden:.3g} s"),
            ("a step", f"{job.step_s:.4g} s + {waiting:.3g} s of waiting = {option.step_s:.4g} s"),
            ("computes", f"{job.step_s:.4g} s / {option.step_s:.4g} s = {_percent(option)}"),
            ("time", total),
        ]
    else:
        computing, rounds = option.sync_every * job.step_s, (steps - 1) // option.sync_every
        round_s = option.sync_every * option.step_s
        waits = f"{computing:.4g} s + {round_s - computing:.3g} s of waiting"
        rows += [("a round", f"{option.sync_every} x {job.step_s:.4g} s = {computing:.4g} s")]
        if option.delay:
            hidden = option.delay * job.step_s
            rows += [("hidden", f"behind {_steps(option.delay)}: up to {hidden:.3g} s")]
        rows += [
            ("with waiting", f"{waits} = {round_s:.4g} s"),
            ("computes", f"{computing:.4g} s / {round_s:.4g} s = {_percent(option)}"),
            ("rounds", f"{steps:,} / {option.sync_every}, none at the end: {rounds:,}"),
            ("time", total),
        ]
        if steps // option.sync_every < MIN_ROUNDS:
            rows += [("few rounds", f"fewer than {MIN_ROUNDS}: expect a higher loss")]
    speed = job.one_worker_s / option.time_s
    alone = format_seconds(job.one_worker_s)
    rows += [("speed", f"{alone} / {format_seconds(option.time_s)} = {speed:.2f}")]
    return rows + _loss(job, option)


def _encoding(job: PlannedRun, option: Option) -> str:
    if option.candidate.method == "ddp":
        return f"gradients of {job.bytes_per_gradient} B"
    encoding = ENCODINGS[option.candidate.compression]
    if encoding.block == 1:
        return "float32, 4 B"
    return f"{option.candidate.compression}, {encoding.row_bytes} B for {encoding.block}"


def _sent(job: PlannedRun, option: Option) -> str:
    n = job.num_workers
    sent = format_bytes(option.round_bytes / option.fragments)
    return f"all-reduce of N workers: 2 x (N - 1) / N = {2 * (n - 1) / n:.3g} messages: {sent}"


def _exchange(job: PlannedRun, option: Option) -> str:
    megabits, link = 8e-6 * option.round_bytes / option.fragments, job.times.slowest_link()
    seconds = format_seconds(option.exchange_s)
    if job.links.sites > 1 or job.links.pairs:
        return f"{megabits:,.5g} Mbit of each worker on all its links, and latency: {seconds}"
    return f"{megabits:,.5g} Mbit / {link.mbit_per_s:g} Mbit/s, and latency: {seconds}"


def _loss(job: PlannedRun, option: Option) -> list[tuple[str, str]]:
    if option.gap is None or option.candidate.method == "ddp":
        return []
    drift = SLOPE * math.log(job.num_workers) * (job.num_parameters / 1e9) ** -EXPONENT
    scale = math.log(option.sync_every) / math.log(FITTED_SYNC_EVERY)
    rows = [
        (
            "loss",
            f"exp({OFFSET} + {SLOPE} x ln N x (P / 1e9)^-{EXPONENT} x ln H / ln 30) - 1",
        ),
        ("", f"= exp({OFFSET} + {drift:.4f} x {scale:.3g}) - 1 = {option.gap}"),
    ]
    if option.gap.outside:
        rows += [("* outside the fit", ", ".join(option.gap.outside))]
    if METHOD_TABLE[option.candidate.method].costs == "streaming":
        rows += [("fragments", f"by layers: the model needs at least {option.fragments}")]
    if option.delay:
        within = f"up to 0.2 % more for a delay of up to {MAX_SHORT_DELAY} (arXiv:2501.18512)"
        rows += [("delay", within)]
    if option.candidate.compression != "none":
        rows += [(option.candidate.compression, "no loss in our own runs (docs/results.md)")]
    return rows


def _percent(option: Option) -> str:
    return f"{100 * option.utilisation:.1f} %"


# ---------------------------------------------------------------------------- numbers


def format_count(number: float) -> str:
    """Format a number with a unit, such as 124M or 2.48B.

    Example:
        >>> format_count(124e6), format_count(2.48e9), format_count(20e12)
        ('124M', '2.48B', '20T')
    """
    for factor, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g}{unit}"
    return f"{number:g}"


def as_json(plan: Plan, outcomes: list[Outcome] | None = None) -> dict[str, Any]:
    """Return the plan as plain numbers and strings: seconds, bytes, percent of the loss.

    With ``outcomes`` it includes the table of failures; time and cost are null at no goodput.
    """
    job = plan.job

    def row(option: Option) -> dict[str, Any]:
        values = dataclasses.asdict(option)
        values["candidate"]["measured"] = option.candidate.measured
        return values | {
            "title": option.candidate.title,
            "speed": job.one_worker_s / option.time_s,
        }

    def outcome(one: Outcome) -> dict[str, Any]:
        values = dataclasses.asdict(one) | {"shares": one.shares._asdict()}
        is_finite = one.billion_tokens_s < math.inf
        return values if is_finite else values | {"billion_tokens_s": None, "cost": None}

    return {
        "num_parameters": job.num_parameters,
        "num_workers": job.num_workers,
        "step_s": job.step_s,
        "tokens_per_step": job.tokens_per_step,
        "tokens": job.tokens,
        "steps": job.steps,
        "one_worker_s": job.one_worker_s,
        "options": [row(one) for one in plan.options],
        "chosen": row(plan.chosen),
        "reason": plan.reason,
        "commands": commands(plan),
        **({} if outcomes is None else {"failures": [outcome(one) for one in outcomes]}),
    }
