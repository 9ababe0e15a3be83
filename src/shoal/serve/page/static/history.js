// The last two minutes of some numbers of each service, kept by the page.

const SPAN_S = 120;

export class History {
  #points = new Map(); // name of a service -> [{time, tokens, waiting}]

  add(snapshot) {
    const names = new Set();
    for (const service of snapshot.services) {
      names.add(service.name);
      const points = this.#points.get(service.name) ?? [];
      this.#points.set(service.name, points);
      points.push({
        time: snapshot.time,
        tokens: service.output_tokens_per_s,
        waiting: service.waiting,
      });
      while (points[0].time < snapshot.time - SPAN_S) points.shift();
    }
    for (const name of this.#points.keys()) if (!names.has(name)) this.#points.delete(name);
  }

  /** The values of `what` ("tokens" or "waiting"), as [share of the two minutes from 0 to 1, value]. */
  values(service, what) {
    const points = this.#points.get(service) ?? [];
    const end = points.at(-1)?.time ?? 0;
    return points.map((point) => [1 - (end - point.time) / SPAN_S, point[what]]);
  }
}
