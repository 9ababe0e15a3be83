"""A second simulator, made from the page on policies alone: one service, first come first served.

Admission is aggressive, the newest is preempted and computed again, nothing is cached, all steps are as long.
"""

from dataclasses import dataclass, field


@dataclass
class Job:
    """A request, and how far it has come."""

    name: str
    place: tuple[int, int]
    """When it arrived, and its number among those submitted."""
    prompt: int
    output: int
    tokens: int = 0
    """Tokens of its output."""
    computed: int = 0
    blocks: int = 0
    preemptions: int = 0
    first: int = 0
    finish: int = 0

    @property
    def known(self) -> int:
        return self.prompt + self.tokens

    @property
    def decodes(self) -> bool:
        """Whether only its newest token is to be computed."""
        return self.tokens > 0 and self.computed == self.known - 1


@dataclass
class Engine:
    """A pool of blocks, a queue, and a batch; ``run`` once."""

    blocks: int
    block_size: int
    step_ns: int
    most_tokens: int
    most_running: int
    watermark: float
    now: int = 0
    waiting: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    """In the order of their admissions."""
    steps: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """When each began, and the tokens of its rows, fewest first."""

    @property
    def free(self) -> int:
        return self.blocks - sum(job.blocks for job in self.running)

    def need(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def run(self, jobs: list[Job]) -> None:
        coming = sorted(jobs, key=lambda job: job.place)
        while coming or self.waiting or self.running:
            if not self.waiting and not self.running:
                self.now = max(self.now, coming[0].place[0])
            while coming and coming[0].place[0] <= self.now:
                self.waiting.append(coming.pop(0))
            self.step()

    def step(self) -> None:
        """One step: decodes, then prompts begun earlier, then those that wait."""
        rows: dict[str, int] = {}
        room = self.most_tokens
        short = False
        oldest_first = sorted(self.running, key=lambda job: job.place)
        for job in oldest_first:
            if job in self.running and job.decodes and room:
                short |= self.grow(job, job.known)
                if job in self.running:
                    rows[job.name] = 1
                    room -= 1
        for job in oldest_first:
            if job in self.running and not job.decodes and room:
                count = min(room, job.known - job.computed)
                short |= self.grow(job, job.computed + count)
                if job in self.running:
                    rows[job.name] = count
                    room -= count
        while self.waiting and room and not short:
            job = self.waiting[0]
            blocks = self.need(job.known)
            held = self.blocks - self.free
            fits = held + blocks <= self.watermark * self.blocks or not self.running
            if len(self.running) >= self.most_running or blocks > self.free or not fits:
                break
            self.waiting.pop(0)
            self.running.append(job)
            rows[job.name] = min(room, job.known)
            job.blocks = self.need(rows[job.name])
            room -= rows[job.name]
        rows = {job.name: rows[job.name] for job in self.running if job.name in rows}
        self.steps.append((self.now, tuple(sorted(rows.values()))))
        self.now += self.step_ns
        for job in list(self.running):
            if job.name not in rows:
                continue
            job.computed += rows[job.name]
            if job.computed == job.known:
                job.tokens += 1
                job.first = job.first or self.now
                if job.tokens == job.output:
                    job.finish = self.now
                    self.running.remove(job)

    def grow(self, job: Job, tokens: int) -> bool:
        """Blocks for so many tokens, as far as it needs more; whether a request was preempted."""
        short = False
        while job in self.running and self.need(tokens) > job.blocks:
            if self.free:
                job.blocks += 1
                continue
            short = True
            victim = self.running.pop()  # admitted last; never the first
            victim.blocks = victim.computed = 0
            victim.preemptions += 1
            self.waiting.append(victim)
            self.waiting.sort(key=lambda waiting: waiting.place)
        return short
