// The stream of snapshots: reads /live, and connects again when it ends.

import { eventData } from "./events.js";
import { ask, Refused } from "./keys.js";

const WAITS_S = [1, 2, 4, 8, 15];
const SILENCE_S = 15; // a connection without a snapshot for so long is given up

/**
 * on.snapshot(snapshot), on.lost(since, retryAt, message): no connection, times in ms of performance.now();
 * on.refused(error): the key is missing or wrong, and nothing happens until retry() is called.
 */
export class Feed {
  #on;
  #abort = null;
  #wake = null;
  #failures = 0;
  #lastSeen = performance.now();

  constructor(on) {
    this.#on = on;
  }

  async run() {
    for (;;) {
      let message = "the stream ended";
      try {
        await this.#read();
      } catch (error) {
        message = error.message;
        if (error instanceof Refused && error.needsKey) {
          this.#on.refused(error);
          await this.#sleep(null);
          this.#failures = 0;
          continue;
        }
      }
      const wait = WAITS_S[Math.min(this.#failures, WAITS_S.length - 1)];
      this.#failures += 1;
      this.#on.lost(this.#lastSeen, performance.now() + wait * 1000, message);
      await this.#sleep(wait);
    }
  }

  /** Connect now, with a new key or because somebody looks at the page again. */
  retry() {
    this.#wake?.();
  }

  /** Give the present connection up, and connect again. */
  restart() {
    this.#failures = 0;
    this.#abort?.abort();
    this.retry();
  }

  async #read() {
    this.#abort = new AbortController();
    let timer = null;
    const guard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => this.#abort.abort(), SILENCE_S * 1000);
    };
    guard();
    try {
      const response = await ask("live", "live", {
        headers: { Accept: "text/event-stream" },
        signal: this.#abort.signal,
      });
      for await (const data of eventData(response)) {
        guard();
        this.#failures = 0;
        this.#lastSeen = performance.now();
        this.#on.snapshot(JSON.parse(data));
      }
    } finally {
      clearTimeout(timer);
    }
  }

  /** seconds: null: until retry(). */
  #sleep(seconds) {
    return new Promise((resolve) => {
      const timer = seconds === null ? null : setTimeout(resolve, seconds * 1000);
      this.#wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }
}
