"""Schedule logs: step plans as lines of text."""

from collections.abc import Iterable, Sequence

from shoal.core import BlockCopy, StepPlan


def describe(plan: StepPlan, scheduled_ns: int | None = None, steps_ns: Sequence[int] = ()) -> str:
    """One line: number, service, each sequence with its tokens (``*``: one is sampled), then the changes.

    ``3 chat: 0+1* 4+7; code: 5+1* | joined 4(16 of 23 cached: 2,5) | left 1 | grown 0(9) | copy 5>8 |
    zero 3``; also ``swap-out code:7>h0 | moved 2(4,5) | evict A | fetch B``, where h is a block in host
    memory, and A and B are weights.

    scheduled_ns, steps_ns: when the plan was made and the duration of each iteration, if they are to be
    included: ``at 5000000 | took 800000 810000``, nanoseconds. They determine the times of all tokens and the
    latest step times of each service, on which the bound on inter-token latency depends.
    """
    sampled = set(plan.sampled)
    rows = [
        f"{seq_id}+{count}{'*' if row in sampled else ''}"
        for row, (seq_id, count) in enumerate(zip(plan.seq_ids, plan.new_tokens, strict=True))
    ]
    services = [f"{service}: {' '.join(rows[own])}" for service, own in plan.rows_by_service()]
    parts = [f"{plan.number} {'; '.join(services)}"]
    if plan.iterations > 1:
        parts.append(f"iterations {plan.iterations}")
    if plan.joined:
        joined = (
            f"{new.seq_id}({new.computed} of {len(new.tokens)} cached: {_ids(new.blocks)})"
            for new in plan.joined
        )
        parts.append("joined " + " ".join(joined))
    if plan.left:
        parts.append("left " + " ".join(map(str, plan.left)))
    if plan.grown:
        parts.append("grown " + " ".join(f"{seq_id}({_ids(blocks)})" for seq_id, blocks in plan.grown))
    if plan.copies:
        parts.append("copy " + _copies(plan.copies, plan.service))
    if plan.zero:
        parts.append("zero " + _ids(plan.zero))
    if plan.swap_out_copies:
        parts.append("swap-out " + _copies(plan.swap_out_copies, plan.service))
    if plan.moved:
        parts.append("moved " + " ".join(f"{seq_id}({_ids(blocks)})" for seq_id, blocks in plan.moved))
    parts += [f"evict {name}" for name in plan.evict]
    parts += [f"fetch {name}" for name in plan.fetch]
    if scheduled_ns is not None:
        parts.append(f"at {scheduled_ns}")
    if steps_ns:
        parts.append("took " + " ".join(map(str, steps_ns)))
    return " | ".join(parts)


def _copies(copies: Iterable[BlockCopy], service: str) -> str:
    return " ".join(
        ("" if copy.service == service else f"{copy.service}:")
        + f"{'h' if copy.source_host else ''}{copy.source}>{'h' if copy.target_host else ''}{copy.target}"
        for copy in copies
    )


def _ids(blocks: tuple[int, ...]) -> str:
    return ",".join(map(str, blocks))
