"""Order ``round-robin``: round robin over services, for prompts and for decodes (MuxServe, as a baseline)."""

from dataclasses import dataclass

from shoal.schedule.policies.orders.fcfs import BySubmission, unfinished_services
from shoal.schedule.policies.orders.protocol import Decision, Turn
from shoal.schedule.policies.view import SchedulerView, ServiceView


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRobin(BySubmission):
    """Services take turns, first come first served inside each (MuxServe: Duan et al., ICML 2024).

    Prompts: the service with the longest time since its last prompt step comes first, together with its
    decodes. MuxServe runs one prompt step and the decodes of all services at the same time, in parts of the
    device. Here, after a prompt step every other service with decodes takes one decode step before the next
    prompt step. So a prompt delays decodes only by its own step and one step of each other service.

    If no prompt can be computed (none is waiting, or none fits), services take turns with decodes: ``quota``
    steps in a row, then the service with the longest time since its last step.
    """

    def decide(self, view: SchedulerView, now_ns: int) -> Decision:
        """Decodes delayed by the last prompt step, then prompts, then decodes by quota."""
        services = unfinished_services(view)
        last_prefill = max((service.last_prefill for service in view.services.values()), default=-1)
        decoding = [service for service in services if not service.running.prefilling.all()]
        delayed = [service for service in decoding if service.last_step < last_prefill]
        delayed.sort(key=lambda service: service.last_step)
        prompts = [service for service in services if service.waiting or service.running.prefilling.any()]
        prompts.sort(key=lambda service: (service.last_prefill, _oldest_prompt(service)))
        decoding.sort(key=lambda service: (not _has_quota_left(service), service.last_step))
        turns = [_decode_turn(service) for service in delayed]
        turns += [Turn(service.service, waiting=service.waiting, prefill=True) for service in prompts]
        turns += [_decode_turn(service) for service in decoding]
        return Decision(turns)


def _decode_turn(service: ServiceView) -> Turn:
    """A turn without prompts."""
    running = service.running
    if not running.prefilling.any():
        return Turn(service.service)
    return Turn(service.service, running.seq_id[running.prefilling == 0])


def _has_quota_left(service: ServiceView) -> bool:
    """Whether it made the last step, of decodes only, and has not used up its quota."""
    return 0 < service.consecutive_steps < service.traits.quota


def _oldest_prompt(service: ServiceView) -> int:
    """Number of the request that it would prefill first."""
    prompts = service.running.number[service.running.prefilling != 0]
    return int(prompts[0]) if len(prompts) else service.waiting[0].number
