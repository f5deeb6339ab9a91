"""Which schedules members that come and go can keep: those with one round under way at a time.

Then the state of the run is known when a round begins, and a newcomer can take part in that round.
"""

from __future__ import annotations

from lightning_loco.algorithms import Mix
from lightning_loco.rounds.settings import RoundSettings
from lightning_loco.schedules import EverySteps, Staggered


def check_schedule(settings: RoundSettings) -> None:
    """Refuse what members cannot do.

    Args:
        settings: Prepared.

    Raises:
        ValueError: If rounds do not come after a fixed number of local steps, if several may be
            under way at once, or if local parameters are kept and nothing is equal on all members.
    """
    schedule, algorithm = settings.schedule, settings.algorithm
    if not isinstance(schedule, (EverySteps, Staggered)):
        raise ValueError(
            f"membership=Elastic(...) cannot make {schedule}: rounds must come after a fixed "
            "number of local steps. Use one number for sync_every."
        )
    is_partial = isinstance(schedule, Staggered) or isinstance(settings.landing, Mix)
    if is_partial and not algorithm.replicated:
        raise ValueError(
            "With membership=Elastic(...) fragments, delay and mix need outer parameters that are "
            f"equal on all members, got {type(algorithm).__name__}. Use Streaming or Async DiLoCo, "
            "or leave them out."
        )
    if isinstance(schedule, Staggered):
        _check_delay(schedule.of_worker(0))


def _check_delay(schedule: Staggered) -> None:
    longest = schedule.shortest_gap
    if schedule.delay > longest:
        raise ValueError(
            "With membership=Elastic(...) a result must land before the next round begins: delay "
            f"must be at most sync_every // fragments = {schedule.sync_every} // "
            f"{schedule.fragments} = {longest}, got {schedule.delay}. Use delay={longest}, fewer "
            "fragments or a larger sync_every."
        )
