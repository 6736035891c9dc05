/** One request: where its time has gone, and its end by an operator. */

import { announce, ask, field, h, setText, table } from "/console/dom.js";
import { bytes, count, seconds, tenant } from "/console/format.js";
import { doing, joined } from "/console/live.js";
import { request as send } from "/console/session.js";

const NAMES = {
  reading: "reading the request", template: "chat template", tokenize: "tokenizing", engine: "engine",
  decoding: "decoding", upstream: "another server", model: "the model",
};

/** The parts of a request's time: {name, from, to, kind}. */
export function waterfall(detail) {
  const rows = [];
  const { chunks } = detail;
  const stages = detail.stages.filter(([stage], place, all) => stage !== all[place - 1]?.[0]);
  stages.forEach(([stage, from], place) => {
    const to = place + 1 < stages.length ? stages[place + 1][1] : detail.seconds;
    if (stage === "engine") rows.push(...inEngine(detail, from, to));
    else if (stage === "decoding") rows.push({ name: `${NAMES[stage]}: ${count(detail.completion_tokens)} tokens`, from, to, kind: "decode" });
    else rows.push({ name: NAMES[stage] ?? stage, from, to, kind: "ready" });
  });
  if (!stages.length && chunks.length) rows.push(...inEngine(detail, chunks[0][0] - detail.queue_seconds, chunks.at(-1)[1]));
  for (const [name, from, to] of detail.calls) rows.push({ name: `call of ${name}`, from, to, kind: "ready" });
  if (detail.write_seconds > 0) rows.push({ name: "writes: waiting for a slow client, together", from: detail.seconds - detail.write_seconds, to: detail.seconds, kind: "write" });
  return rows;
}

function inEngine(detail, from, to) {
  const { chunks } = detail;
  const begun = chunks.length ? chunks[0][0] : detail.queue_seconds ? from + detail.queue_seconds : to;
  const rows = [{ name: "queue", from, to: Math.min(begun, to), kind: "queue" }];
  chunks.forEach(([start, end, tokens], place) => rows.push({ name: `prompt, part ${place + 1}: ${count(tokens)} tokens`, from: start, to: end, kind: "prompt" }));
  const end = chunks.length ? chunks.at(-1)[1] : begun;
  if (to - end > 1e-4) rows.push({ name: chunks.length ? "first token on its way" : "prompt", from: end, to, kind: chunks.length ? "ready" : "prompt" });
  return rows;
}

export const requests = {
  title: "Request",
  open(context) {
    const [chosen = ""] = context.parts();
    const list = table("Requests in flight, and those that ended since this page was opened", [
      ["Request", (row) => h("a", { href: `#/request/${encodeURIComponent(row.id)}`, class: "mono", data: { as: row.id } }, row.id.slice(-20))],
      ["Tenant", (row) => tenant(row.tenant)],
      ["Model", (row) => row.target || row.model],
      ["State", (row) => row.state],
      ["Time", (row) => seconds(row.seconds ?? row.age), "n"],
      ["First token", (row) => seconds(row.ttft_seconds ?? row.ttft), "n"],
      ["Prompt", (row) => count(row.prompt_tokens ?? row.prompt), "n"],
      ["Output", (row) => count(row.completion_tokens ?? row.output), "n"],
    ], (row) => row.id);
    const title = h("h2", {}, chosen ? `Request ${chosen}` : "Choose a request");
    const facts = h("p", { class: "soft" });
    const parts = table("Time by stage", [
      ["Part", (row) => row.name],
      ["Begins at", (row) => seconds(row.from), "n"],
      ["Takes", (row) => seconds(row.to - row.from), "n"],
      ["", (row) => bar(row)],
    ], (row) => row.key);
    const note = h("p", { class: "soft" });
    const why = h("span", { class: "soft", id: "why-not" });
    const cancel = h("button", { type: "button", class: "danger", aria: { describedby: "why-not" }, on: { click: end } }, "Cancel this request");
    const search = h("input", { type: "search", value: chosen, autocomplete: "off" });
    const find = h("form", { class: "row", on: { submit: (event) => { event.preventDefault(); location.hash = `#/request/${encodeURIComponent(search.value.trim())}`; } } },
      field("Id (x-request-id)", search), h("button", { type: "submit" }, "Show"));
    let state = {}, detail = null;
    const ended = new Map();

    async function end() {
      if (await ask("Cancel this request?", `${chosen} of ${tenant(detail?.tenant)} ends with an error.`, { confirm: "Cancel it", danger: true }) === null) return;
      try {
        await send("/console/cancel", { method: "POST", body: { id: chosen } });
        announce("The request is cancelled.");
      } catch (error) {
        context.notice(error.message);
      }
    }

    function update(sections) {
      state = { ...state, ...sections };
      if (!state.requests) return;
      for (const row of sections.requests?.ended ?? []) ended.set(row.id, { ...row, state: row.outcome + (row.reason ? `: ${row.reason}` : "") });
      while (ended.size > 100) ended.delete(ended.keys().next().value);
      const inFlight = joined(state.requests, []).map((row) => ({ ...row, state: doing(row) }));
      list.show([...inFlight, ...[...ended.values()].reverse()]);
      if (state.requests.detail?.id === chosen) detail = state.requests.detail;
      show();
    }

    function show() {
      const reason = context.whyNot();
      cancel.disabled = Boolean(reason) || !detail || detail.ended;
      setText(why, detail && !detail.ended ? reason : "");
      cancel.hidden = !chosen || Boolean(detail?.ended);
      if (!detail) return setText(facts, chosen ? "It is not in flight, and it did not end while a console was open." : "");
      const words = [
        `${tenant(detail.tenant)}, ${detail.target || detail.model}, ${detail.route}`,
        detail.ended ? `${detail.outcome}${detail.reason ? ` (${detail.reason})` : ""}, status ${detail.status}` : `in flight, ${NAMES[detail.stage] ?? detail.stage}`,
        `${count(detail.prompt_tokens)} prompt tokens, ${count(detail.cached_tokens)} of them cached, ${count(detail.completion_tokens)} of output`,
        `first token ${seconds(detail.ttft_seconds)}, together ${seconds(detail.seconds)}`,
        `${bytes(detail.bytes_in)} in, ${bytes(detail.bytes_out)} out`,
        detail.finish_reasons.length ? `finished: ${detail.finish_reasons.join(", ")}` : "",
        detail.deadline_in_seconds !== null && !detail.ended ? `deadline in ${seconds(detail.deadline_in_seconds)}` : "",
        detail.ignored.length ? `ignored: ${detail.ignored.join(", ")}` : "",
      ];
      setText(facts, words.filter(Boolean).join(" · "));
      parts.show(waterfall(detail).map((row, place) => ({ ...row, key: `${place} ${row.name}`, whole: detail.seconds })));
      setText(note, detail.stages.length ? "" : "No console was open when it arrived, so its stages were not recorded.");
    }

    const element = h("div", {}, find, title, facts, h("p", { class: "row" }, cancel, why), parts.element, note, h("h2", {}, "Requests"), list.element);
    return { element, update, looksAt: { request: chosen } };
  },
};

function bar({ from, to, kind, whole }) {
  const part = h("i", { class: kind });
  const [left, width] = [(100 * from) / (whole || 1), (100 * Math.max(to - from, 0)) / (whole || 1)].map((value) => Math.min(100, Math.max(0, value)));
  part.style.left = `${left}%`;
  part.style.width = `${Math.min(width, 100 - left)}%`;
  return h("div", { class: "bar", data: { as: `${left} ${width} ${kind}` }, aria: { hidden: "true" } }, part);
}
