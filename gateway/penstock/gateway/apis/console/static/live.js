/** What an engine does now: its requests and what they wait for, its blocks, its steps, and figures over time. */

import { field, h, select, setOptions, setText, table } from "/console/dom.js";
import { count, percent, quantile, rate, seconds, tenant } from "/console/format.js";
import { blockMap, linePlot, stepTimeline } from "/console/plot.js";

export const WAITS = {
  "": "", adapter: "its adapter is loading", grammar: "its grammar is being compiled",
  image: "its image is being encoded", blocks_outside: "its blocks are being read", same_prompt: "another request computes its prompt",
  first_sample: "the first sample computes its prompt", foreground: "requests that are not in the background",
  seat: "a place in the batch: max-num-seqs requests are running", blocks: "blocks: the KV cache is full", turn: "its turn",
};
const RECENT_SECONDS = 10, KEPT_SECONDS = 180, MOST_STEPS = 400;

/** A request as an engine sees it, from the array that it comes as. */
export function ofEngine(row) {
  const [id, status, waitsFor, owner, prompt, output, computed, cached, blocks, preemptions, age, queued] = row;
  return { id, status, waitsFor, tenant: owner, prompt, output, computed, cached, blocks, preemptions, age, queued };
}

/** Requests of the gateway with what engines know of them, by id; several samples of a call are one row. */
export function joined(watched, parts) {
  const rows = new Map((watched?.requests ?? []).map((row) => [row.id, {
    id: row.id, tenant: row.tenant, model: row.target || row.model, stage: row.stage, age: row.seconds, in_stage: row.stage_seconds,
    prompt: row.prompt_tokens, output: row.completion_tokens, ttft: row.ttft_seconds, samples: [],
  }]));
  for (const part of parts) {
    for (const sample of (part?.requests ?? []).map(ofEngine)) {
      const id = sample.id || "(not known)";
      if (!rows.has(id)) rows.set(id, { ...sample, id, model: "", stage: "engine", samples: [] });
      rows.get(id).samples.push(sample);
    }
  }
  return [...rows.values()];
}

/** In words: what a request does, or waits for. */
export function doing(row) {
  const sample = row.samples.find((one) => one.waitsFor) ?? row.samples.find((one) => one.status !== "running") ?? row.samples[0];
  if (!sample) return row.stage === "engine" ? "waits for the engine" : row.stage;
  if (sample.status === "running") return sample.computed < sample.prompt ? `computes its prompt: ${sample.computed} of ${sample.prompt}` : "generates";
  const why = WAITS[sample.waitsFor] ?? sample.waitsFor;
  return `${sample.status === "preempted" ? "was preempted, " : ""}${why ? `waits for ${why}` : "is next"}`;
}

const idLink = (id) => h("a", { href: `#/request/${encodeURIComponent(id)}`, class: "mono", data: { as: id } }, id.slice(-14));

export const live = {
  title: "Live",
  open(context) {
    const models = select([], { on: { change: () => { history = []; steps = []; context.look({ model: models.value }); } } });
    const problem = h("p", { class: "bad", role: "alert" });
    const tiles = h("div", { class: "tiles" });
    const plots = {
      tokens: linePlot("Tokens per second", [["generated", "decode"], ["prompt", "prefill"]]),
      queue: linePlot("Requests", [["running", "used"], ["waiting", "prefill"]]),
      ttft: linePlot("Time to the first token, median of 10 s", [["TTFT", "shared"]]),
      itl: linePlot("Time between tokens, median of 10 s", [["ITL", "decode"]]),
    };
    const timeline = stepTimeline("Steps");
    const map = blockMap("Blocks of the KV cache");
    const legend = h("ul", { class: "legend" });
    map.element.append(legend);
    const tenants = table("Requests by tenant, since this page was opened", [
      ["Tenant", (row) => tenant(row.name)],
      ["In flight", (row) => count(row.in_flight), "n"],
      ["Share", (row) => percent(row.in_flight, row.all), "n"],
      ["Waiting for a token", (row) => count(row.queued), "n"],
      ["Prompt tokens in flight", (row) => count(row.prompt_tokens), "n"],
      ["Begun", (row) => count(row.begun), "n"],
      ["Ended", (row) => count(row.ended), "n"],
      ["Refused", (row) => count(row.refused), "n"],
      ["Tokens of ended requests", (row) => count(row.tokens), "n"],
    ], (row) => row.name);
    const rows = table("Requests in flight, the oldest first", [
      ["Request", (row) => idLink(row.id)],
      ["Tenant", (row) => tenant(row.tenant)],
      ["Model", (row) => row.model],
      ["State", doing],
      ["Age", (row) => seconds(row.age), "n"],
      ["Prompt", (row) => count(row.prompt), "n"],
      ["Cached", (row) => count(row.samples[0]?.cached), "n"],
      ["Output", (row) => count(row.output), "n"],
      ["Blocks", (row) => count(row.samples.reduce((sum, one) => sum + one.blocks, 0)), "n"],
      ["Preempted", (row) => count(row.samples.reduce((sum, one) => sum + one.preemptions, 0)), "n"],
    ], (row) => row.id);
    const more = h("p", { class: "soft" });
    let history = [], steps = [], before = null, state = {};
    const restarts = new Map();
    const latencies = { ttft: [], itl: [], seen: new Set() };

    function note(figures, name) {
      const stats = figures.engines[name] ?? {};
      const now = { at: figures.at, out: stats.generation_tokens ?? 0, prompts: stats.prompt_tokens ?? 0 };
      const apart = before ? now.at - before.at : 0;
      if (apart > 0.05) {
        const at = now.at;
        for (const kind of ["ttft", "itl"]) latencies[kind] = latencies[kind].filter(([time]) => time > at - RECENT_SECONDS);
        history.push({
          at, running: stats.num_running ?? 0, waiting: stats.num_waiting ?? 0,
          out: Math.max(0, now.out - before.out) / apart, prompts: Math.max(0, now.prompts - before.prompts) / apart,
          ttft: quantile(latencies.ttft.map(([, value]) => value), 0.5), itl: quantile(latencies.itl.map(([, value]) => value), 0.5),
        });
        history = history.filter((point) => point.at > at - KEPT_SECONDS);
      }
      before = now;
      return stats;
    }

    function noteLatencies(watched, at) {
      for (const row of watched.requests) {
        if (row.ttft_seconds != null && !latencies.seen.has(row.id)) {
          latencies.seen.add(row.id);
          latencies.ttft.push([at, row.ttft_seconds]);
        }
        if (row.ttft_seconds != null && row.completion_tokens > 1) latencies.itl.push([at, (row.seconds - row.ttft_seconds) / (row.completion_tokens - 1)]);
      }
      for (const row of (watched.ended ?? []).filter((one) => one.ended_at > at - RECENT_SECONDS)) {
        if (row.ttft_seconds != null && !latencies.seen.delete(row.id)) latencies.ttft.push([at, row.ttft_seconds]);
        if (row.itl_seconds != null) latencies.itl.push([at, row.itl_seconds]);
      }
    }

    function update(sections) {
      state = { ...state, ...sections };
      setOptions(models, (state.models ?? []).filter((row) => row.runner && row.kinds.includes("generates")).map((row) => row.name));
      const name = state.engine?.model || models.value;
      if (sections.requests && state.figures) noteLatencies(sections.requests, state.figures.at);
      const stats = sections.figures ? note(sections.figures, name) : state.figures?.engines[name] ?? {};
      const parts = state.engine?.parts ?? [];
      if (sections.engine) {
        for (const part of parts) steps.push(...(part?.steps ?? []).map(([number, at, time, prompt, tokens, requests]) => ({ number, at, seconds: Math.max(0, time), prompt, tokens, requests })));
        steps = steps.filter((step) => step.seconds > 0).sort((a, b) => a.at - b.at).slice(-MOST_STEPS);
      }
      setText(problem, state.engine?.problem || troubleOf(name));
      draw(stats, parts);
      show(parts);
    }

    /** What is wrong with an engine, or was since this page was opened: most are back within a second. */
    function troubleOf(name) {
      const row = (state.models ?? []).find((one) => one.name === name && one.runner);
      if (!row) return "";
      if (!restarts.has(name)) restarts.set(name, row.restarts);
      if (!row.ready && !row.asleep) return `The engine of ${name} is not ready: ${row.failed ? "it is down" : "it starts, or has died and comes back"}.`;
      return row.restarts > restarts.get(name) ? `The engine of ${name} has died and is back: restart ${row.restarts}.` : "";
    }

    function draw(stats, parts) {
      const last = history.at(-1) ?? { out: 0, prompts: 0, ttft: null, itl: null };
      const used = (stats.num_blocks ?? 0) - (stats.num_free_blocks ?? 0);
      const facts = [
        ["generated tokens/s", rate(last.out)], ["prompt tokens/s", rate(last.prompts)],
        ["running", count(stats.num_running)], ["waiting", count(stats.num_waiting)],
        ["KV cache in use", percent(used, stats.num_blocks)], ["TTFT, median", seconds(last.ttft)], ["ITL, median", seconds(last.itl)],
        ["prefix cache hits", percent(stats.prefix_hits ?? 0, stats.prefix_queries)], ["preemptions", count(stats.preemptions)],
      ];
      if (stats.num_state_rows) facts.push(["recurrent states in use", percent(stats.num_state_rows - stats.num_free_state_rows, stats.num_state_rows)]);
      tiles.replaceChildren(...facts.map(([title, value]) => h("div", { class: "tile" }, h("b", {}, value), h("span", {}, title))));
      plots.tokens.show(history.map((p) => [p.at, p.out, p.prompts]), rate);
      plots.queue.show(history.map((p) => [p.at, p.running, p.waiting]), count);
      plots.ttft.show(history.map((p) => [p.at, p.ttft]), seconds);
      plots.itl.show(history.map((p) => [p.at, p.itl]), seconds);
      const first = parts.find((part) => part) ?? {};
      timeline.show(steps, first.target ?? 0, seconds);
      const blocks = parts.map((part) => part?.blocks).filter(Boolean);
      map.element.hidden = !blocks.length;
      const sums = [0, 1, 2, 3].map((place) => blocks.reduce((sum, one) => sum + one[place], 0));
      const words = ["free and empty", "free and cached", "used", "shared"].map((word, place) => [word, sums[place], ["blank", "cached", "used", "shared"][place]]);
      legend.replaceChildren(
        ...words.map(([word, number, tint]) => h("li", {}, h("i", { class: `is-${tint}` }), `${word} ${count(number)}`)),
        blocks[0]?.[4] > 1 ? h("li", {}, `a cell shows one of ${blocks[0][4]} blocks`) : "");
      map.show(blocks.map((one) => one[5]).join(""), words.map(([word, number]) => `${count(number)} ${word}`).join(", "));
    }

    function show(parts) {
      const watched = state.requests;
      if (!watched) return;
      const all = joined(watched, parts).sort((a, b) => b.age - a.age);
      rows.show(all.slice(0, 200));
      const hidden = Math.max(watched.in_flight - watched.requests.length, 0) + parts.reduce((sum, part) => sum + (part?.more_requests ?? 0), 0);
      setText(more, hidden ? `${count(hidden)} more are not in the list.` : "");
      const by = Object.entries(watched.tenants).map(([name, row]) => ({ name, ...row, all: watched.in_flight }));
      tenants.show(by.sort((a, b) => b.in_flight - a.in_flight || b.begun - a.begun));
    }

    const element = h(
      "div", {}, h("p", { class: "row" }, field("Model", models)), problem, tiles,
      h("h2", {}, "Over time"), h("div", { class: "grid plots" }, Object.values(plots).map((plot) => plot.element)),
      h("h2", {}, "Engine"), h("div", { class: "grid" }, timeline.element, map.element),
      h("h2", {}, "Tenants"), tenants.element, h("h2", {}, "Requests"), rows.element, more,
    );
    return { element, update, looksAt: {} };
  },
};
