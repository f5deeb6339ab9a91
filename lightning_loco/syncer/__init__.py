"""Decoupled learners and the syncer that merges what they push.

A *learner* is a worker that trains at its own pace. The *syncer* has the parameters of the run,
divided into *fragments*. In a *round* it asks the learners for one of them, *merges* the
pseudo-gradients that they *push*, saves the result, and publishes it as the next *version* of the
fragment, which the learners *fetch*. No learner waits for another one, or for the syncer.

:class:`LearnerEngine` is the interface for training. On the side of a learner, from top to bottom:
``engine`` uses the model, ``learner_thread`` asks the syncer in the background what ``learner``
decides, and ``learner_rounds`` has the counters. On the side of the syncer: ``service`` answers
requests, ``syncer`` merges and saves (``snapshot``, ``tape``), and ``merge_rounds`` decides. What
both must agree on is the ``contract``.
"""

from lightning_loco.syncer.contract import Contract
from lightning_loco.syncer.engine import LearnerEngine
from lightning_loco.syncer.merge_rounds import MergeSettings
from lightning_loco.syncer.service import SyncerServer
from lightning_loco.syncer.settings import DecoupledSettings
from lightning_loco.syncer.syncer import Syncer
from lightning_loco.syncer.tape import Tape, replay

__all__ = [
    "Contract",
    "DecoupledSettings",
    "LearnerEngine",
    "MergeSettings",
    "Syncer",
    "SyncerServer",
    "Tape",
    "replay",
]
