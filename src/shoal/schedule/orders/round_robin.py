"""Round robin over services, for prompts and for decodes (MuxServe, as a baseline)."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.schedule.group import GroupView
from shoal.schedule.orders.fcfs import BySubmission
from shoal.schedule.orders.protocol import Decision, Standing, Turn
from shoal.schedule.tracked import Tracked


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRobin(BySubmission):
    """Services take turns, first come first served inside each (MuxServe: Duan et al., ICML 2024).

    Prompts go round: the service whose last one is longest ago comes first, its decodes riding along.
    MuxServe lets one prompt step and everybody's decodes run at the same time, in parts of the device. In
    steps that means: after a prompt step every other service with decodes takes one step of them before the
    next prompt step, so that a prompt puts off nobody's decodes by more than itself and those of the other
    services.

    Where no prompt can be computed (none waits, or none fits) decodes alone go round: a service takes
    ``quota`` steps in a row, then the one that stepped longest ago takes over.
    """

    def decide(self, standing: Standing, now_ns: int) -> Decision:
        """Decodes put off by the last prompt step, then prompts, then decodes by quota."""
        groups = [group for group in standing.groups.values() if group.running or group.waiting]
        last_prefill = max((group.last_prefill for group in standing.groups.values()), default=-1)
        decoding = [(group, turn) for group in groups if (turn := _decodes(group)).running]
        put_off = [pair for pair in decoding if pair[0].last_step < last_prefill]
        put_off.sort(key=lambda pair: pair[0].last_step)
        turns = [turn for _, turn in put_off]
        prompts = [group for group in groups if group.waiting or group.prefills]
        prompts.sort(key=lambda group: (group.last_prefill, _oldest_prompt(group)))
        turns += [Turn(group.service, group.running, group.waiting, prefill=True) for group in prompts]
        decoding.sort(key=lambda pair: (not _may_go_on(pair[0]), pair[0].last_step))
        turns += [turn for _, turn in decoding]
        return Decision(turns)


def _decodes(group: GroupView) -> Turn:
    """A turn without prompts."""
    running: Sequence[Tracked] = group.running
    if group.prefills:
        begun = set(group.prefills)
        running = [one for one in running if one not in begun]
    return Turn(group.service, running)


def _may_go_on(group: GroupView) -> bool:
    """It made the last step, of decodes only, and has some of its quota left."""
    return 0 < group.streak < group.traits.quota


def _oldest_prompt(group: GroupView) -> int:
    """Whom it would prefill first."""
    return group.prefills[0].number if group.prefills else group.waiting[0].number
