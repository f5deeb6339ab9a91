"""Hooks that Lightning does not have, around methods of one trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_loco.strategies.lightning_compat import TorchDispatchMode

Surrounding = Callable[[], AbstractContextManager[object]]


def _nothing() -> None:
    pass


def add_hooks(
    trainer: pl.Trainer,
    *,
    end: Surrounding,
    sync_point: Callable[[str], None],
    batches_end: Callable[[], None] = _nothing,
    saving: Surrounding = nullcontext,
    validation_start: Callable[[], None] = _nothing,
    validation_end: Callable[[], None] = _nothing,
) -> ExitStack:
    """Surround methods of a trainer; only the instance is touched.

    Args:
        trainer: Whose methods they are.
        end: Around all hooks of the end of training. Those of the strategy come last there, so
            that what callbacks and the module write into the model could only be overwritten.
        meet: Waits for all workers, before a collective of foreign code in hooks of the start and
            the end of training epochs; gets the name of the place.
        batches_end: When the batches of a training epoch have ended, before all hooks of its end.
        saving: From before a checkpoint is collected until it is written.
        validation_start: Before all hooks of the start of a validation, so that what they write
            into the model is validated.
        validation_end: After all hooks of its end, which may take that out again.

    Returns:
        What gives the trainer its own methods back when it is closed.
    """
    stack = ExitStack()
    loop, collectives = trainer.fit_loop, ForeignCollectives(sync_point)

    @contextmanager
    def epoch_start() -> Iterator[None]:
        loop.setup_data()  # now, since processes that load data would inherit what follows
        with collectives:
            yield

    @contextmanager
    def epoch_end() -> Iterator[None]:
        batches_end()
        with collectives:
            yield

    @contextmanager
    def around(before: Callable[[], None], after: Callable[[], None]) -> Iterator[None]:
        before()
        yield
        after()

    validation = loop.epoch_loop.val_loop
    for owner, name, surrounding in (
        (loop, "on_run_end", end),
        (trainer, "save_checkpoint", saving),
        (loop, "on_advance_start", epoch_start),
        (loop, "on_advance_end", epoch_end),
        (validation, "on_run_start", lambda: around(validation_start, _nothing)),
        (validation, "on_run_end", lambda: around(_nothing, validation_end)),
    ):
        stack.callback(_surround(owner, name, surrounding))
    return stack


def _surround(owner: object, name: str, surrounding: Surrounding) -> Callable[[], None]:
    method, had_own = getattr(owner, name), name in vars(owner)

    def surrounded(*args: Any, **kwargs: Any) -> Any:
        with surrounding():
            return method(*args, **kwargs)

    def undo() -> None:
        if had_own:
            setattr(owner, name, method)
        else:
            delattr(owner, name)

    setattr(owner, name, surrounded)
    return undo


class ForeignCollectives(TorchDispatchMode):
    """While it is entered, all workers meet before a collective of the default process group.

    A worker with fewer batches reaches the end of its epoch, and what hooks do there, while others
    still make rounds. At a sync point it takes part in these; inside a collective that does not go
    through the strategy it could not.

    Args:
        meet: Waits for all workers; gets the name of the place.
    """

    def __init__(self, sync_point: Callable[[str], None]) -> None:
        super().__init__()
        self._meet = sync_point

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Meet, then do what was to be done."""
        if func.namespace == "c10d" and any(map(_is_default_group, args)):
            name = func.name().removeprefix("c10d::").strip("_")
            self._meet(f"{name} in a hook of an epoch")
        return func(*args, **(kwargs or {}))


def _is_default_group(argument: object) -> bool:
    if not isinstance(argument, torch.ScriptObject):
        return False
    try:
        return ProcessGroup.unbox(argument) is dist.group.WORLD
    except RuntimeError:  # another object of C++, such as an option
        return False
