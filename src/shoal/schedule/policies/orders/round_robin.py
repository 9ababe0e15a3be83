"""Round robin over services, for prompts and for decodes (MuxServe, as a baseline)."""

from dataclasses import dataclass

from shoal.schedule.policies.orders.fcfs import BySubmission, unfinished_services
from shoal.schedule.policies.orders.protocol import Decision, Turn
from shoal.schedule.policies.view import SchedulerView, ServiceView


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

    def decide(self, view: SchedulerView, now_ns: int) -> Decision:
        """Decodes put off by the last prompt step, then prompts, then decodes by quota."""
        services = unfinished_services(view)
        last_prefill = max((service.last_prefill for service in view.services.values()), default=-1)
        decoding = [service for service in services if not service.running.prefilling.all()]
        put_off = [service for service in decoding if service.last_step < last_prefill]
        put_off.sort(key=lambda service: service.last_step)
        prompts = [service for service in services if service.waiting or service.running.prefilling.any()]
        prompts.sort(key=lambda service: (service.last_prefill, _oldest_prompt(service)))
        decoding.sort(key=lambda service: (not _may_go_on(service), service.last_step))
        turns = [_decodes(service) for service in put_off]
        turns += [Turn(service.service, waiting=service.waiting, prefill=True) for service in prompts]
        turns += [_decodes(service) for service in decoding]
        return Decision(turns)


def _decodes(service: ServiceView) -> Turn:
    """A turn without prompts."""
    running = service.running
    if not running.prefilling.any():
        return Turn(service.service)
    return Turn(service.service, running.seq_id[running.prefilling == 0])


def _may_go_on(service: ServiceView) -> bool:
    """It made the last step, of decodes only, and has some of its quota left."""
    return 0 < service.consecutive_steps < service.traits.quota


def _oldest_prompt(service: ServiceView) -> int:
    """Whom it would prefill first."""
    prompts = service.running.number[service.running.prefilling != 0]
    return int(prompts[0]) if len(prompts) else service.waiting[0].number
