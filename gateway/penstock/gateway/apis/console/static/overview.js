/** Models, engines, memory, health and traffic rules. */

import { h, setText, table } from "/console/dom.js";
import { bytes, count, percent } from "/console/format.js";

const STATES = { READY: "good", LOADING: "warn", UNLOADING: "warn", UNAVAILABLE: "bad" };
const KINDS = { generates: "language model", pools: "embeddings, ranking", tensors: "tensors", upstream: "another server's" };

export const overview = {
  title: "Overview",
  open() {
    const tiles = h("div", { class: "tiles" });
    const models = table("Models and their versions", [
      ["Model", (row) => row.name],
      ["Version", (row) => row.version, "n"],
      ["Kind", (row) => row.kinds.map((kind) => KINDS[kind] ?? kind).join(", ")],
      ["State", (row) => stateOf(row)],
      ["Capabilities", (row) => (row.capabilities ?? []).join(", ")],
      ["Context", (row) => (row.context_length ? count(row.context_length) : ""), "n"],
      ["Adapters", (row) => (row.adapters ?? []).join(", ")],
      ["Progress or error", (row) => row.loading || row.reason],
    ], (row) => `${row.name}/${row.version}`);
    const engines = table("Engines", [
      ["Model", (row) => row.name],
      ["Runs on", (row) => row.runner ?? ""],
      ["State", (row) => row.asleep ? "asleep" : row.failed ? "down" : row.ready ? "ready" : "not ready"],
      ["Running", (row) => count(row.stats.num_running), "n"],
      ["Waiting", (row) => count(row.stats.num_waiting), "n"],
      ["KV cache in use", (row) => percent(row.stats.num_blocks - (row.stats.num_free_blocks ?? 0), row.stats.num_blocks), "n"],
      ["Preemptions", (row) => count(row.stats.preemptions), "n"],
      ["Failed steps", (row) => count(row.stats.step_failures), "n"],
      ["Restarts", (row) => count(row.restarts), "n"],
      ["Replicas ready", (row) => row.stats.replicas ? `${row.stats.replicas.filter((one) => one.ready).length} of ${row.stats.replicas.length}` : "", "n"],
    ], (row) => row.name);
    const memory = table("Memory reserved for models", [
      ["Model", (row) => row.name],
      ["Weights", (row) => bytes(row.weights), "n"],
      ["KV cache", (row) => bytes(row.cache), "n"],
      ["Process and steps", (row) => bytes(row.rest), "n"],
      ["GPUs", (row) => Object.entries(row.gpus).map(([gpu, size]) => `${gpu} ${bytes(size)}`).join(", ")],
      ["Process", (row) => row.pid ?? "", "n"],
    ], (row) => row.name);
    const rules = table("Traffic rules", [
      ["Name", (row) => row.name],
      ["Target", (row) => row.target],
      ["Share", (row) => `${(100 * row.share).toFixed(1)} %`, "n"],
      ["In flight", (row) => count(row.in_flight), "n"],
      ["Ended", (row) => Object.entries(row.ended).map(([outcome, number]) => `${outcome} ${number}`).join(", ")],
      ["Shift", (row) => row.shift],
      ["Not available", (row) => row.unavailable ?? ""],
    ], (row) => `${row.name} ${row.target}`);
    const events = h("ul", { class: "mono" });
    const traffic = h("section", { hidden: true }, h("h2", {}, "Traffic"), rules.element, h("h3", {}, "Events"), events);
    let state = {};
    const update = (sections) => {
      state = { ...state, ...sections };
      const rows = state.models ?? [];
      models.show(rows);
      const stats = state.figures?.engines ?? {};
      engines.show(rows.filter((row) => row.runner && stats[row.name]).map((row) => ({ ...row, stats: stats[row.name] })));
      memory.show(state.memory?.models ?? []);
      tiles.replaceChildren(...tilesOf(state, rows));
      const all = state.traffic?.rules ?? [];
      traffic.hidden = !all.length;
      rules.show(all.flatMap((one) => one.targets.map((target) => ({ ...target, name: one.rule.name, shift: shiftOf(one, target) }))));
      if (sections.traffic) events.replaceChildren(...sections.traffic.events.slice(-12).reverse().map((event) => h("li", {}, eventText(event))));
    };
    const element = h("div", {}, tiles, h("h2", {}, "Models"), models.element, h("h2", {}, "Engines"), engines.element, memory.element, traffic);
    return { element, update };
  },
};

function stateOf(row) {
  const word = row.asleep ? "asleep" : row.state ? row.state.toLowerCase() : "not loaded";
  return h("span", { class: STATES[row.state] ?? "soft", data: { as: word } }, word);
}

function tilesOf(state, rows) {
  const server = state.server ?? {};
  const facts = [
    ["server", server.version ?? ""],
    ["health", server.live === false ? "dead" : server.leaving ? "draining" : server.ready ? "ready" : "not ready"],
    ["models ready", `${rows.filter((row) => row.state === "READY").length} of ${rows.length}`],
    ["loading", rows.filter((row) => row.loading || row.state === "LOADING").length],
    ["calls in flight", count(server.in_flight)],
    ["memory limit of models", state.memory?.limit ? bytes(state.memory.limit) : "free memory"],
  ];
  return facts.map(([name, value]) => h("div", { class: "tile" }, h("b", {}, String(value)), h("span", {}, name)));
}

export function shiftOf(one, target) {
  if (!one.shift || one.rule.shift.to !== target.target) return "";
  const { state, percent: part, reason, error_rate: errors } = one.shift;
  return `${state}, ${part} %${errors ? `, ${(100 * errors).toFixed(1)} % errors` : ""}${reason ? `: ${reason}` : ""}`;
}

export const eventText = (event) => `${new Date(1000 * event.time).toLocaleTimeString()}  ${event.name}: ${event.text}`;
