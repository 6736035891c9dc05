/** The one stream of live data: of the page that is shown, opened again when it breaks, and closed while nobody sees
 * the page. */

import { events, request } from "/console/session.js";

const FIRST_PAUSE = 500, LONGEST_PAUSE = 8000;

export class Feed {
  /** `onUpdate` gets the sections that have changed, `onState` one of "live", "lost", "refused" with a reason. */
  constructor(onUpdate, onState) {
    this.onUpdate = onUpdate;
    this.onState = onState;
    this.query = "";
    this.running = null;
    document.addEventListener("visibilitychange", () => this.restart());
  }

  /** From now on it is about this. */
  look(view, { model = "", request: id = "" } = {}) {
    this.query = new URLSearchParams({ view, model, request: id }).toString();
    this.restart();
  }

  restart() {
    this.running?.abort();
    this.running = null;
    if (document.hidden || !this.query) return;
    this.running = new AbortController();
    this.run(this.query, this.running.signal);
  }

  async run(query, signal) {
    let pause = FIRST_PAUSE;
    while (!signal.aborted) {
      try {
        const response = await request(`/console/live?${query}`, { signal });
        for await (const update of events(response)) {
          if (signal.aborted) return;
          pause = FIRST_PAUSE;
          this.onState("live", "");
          this.onUpdate(update);
        }
        if (!signal.aborted) this.onState("lost", "the server has ended the stream");
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 401 || error.status === 403) return this.onState("refused", error.message);
        this.onState("lost", error.status ? error.message : "the server cannot be reached");
      }
      await new Promise((resolve) => setTimeout(resolve, pause));
      pause = Math.min(2 * pause, LONGEST_PAUSE);
    }
  }
}
