/** Models that take tensors: what they take and give, a form to ask them, their statistics; loading, and traffic. */

import { announce, ask, field, h, select, setOptions, setText, table } from "/console/dom.js";
import { count, seconds } from "/console/format.js";
import { shiftOf } from "/console/overview.js";
import { json, request } from "/console/session.js";

const MOST_SHOWN = 64;
const path = (name, version) => `/v2/models/${encodeURIComponent(name)}${version ? `/versions/${encodeURIComponent(version)}` : ""}`;

export const tensors = {
  title: "Tensors",
  open(context) {
    const models = select([], { on: { change: () => open() } });
    const problem = h("p", { class: "bad", role: "alert" });
    const form = h("div", {});
    const statistics = h("p", { class: "soft" });
    const outputs = h("div", { aria: { live: "polite" } });
    const signature = table("Inputs and outputs", [
      ["", (row) => row.side], ["Name", (row) => row.name], ["Type", (row) => row.datatype], ["Shape", (row) => row.shape.join(" × ")],
    ], (row) => `${row.side} ${row.name}`);
    const why = h("p", { class: "soft", id: "why-no-change" });
    const load = action("Load or reload", () => change("load"));
    const unload = action("Unload", () => change("unload"));
    const typed = h("input", { type: "text", autocomplete: "off", placeholder: "a name in the repository" });
    const rules = h("div", {});
    let state = {}, opened = 0;

    const nameOf = () => models.value.split(" version ");

    async function open() {
      const turn = (opened += 1);
      setText(problem, "");
      outputs.replaceChildren();
      if (!models.value) return;
      const [name, version] = nameOf();
      typed.value = name;
      try {
        const [about, stats] = await Promise.all([json(path(name, version)), json(`${path(name, version)}/stats`).catch(() => null)]);
        if (turn !== opened) return;
        signature.show([...about.inputs.map((one) => ({ ...one, side: "in" })), ...about.outputs.map((one) => ({ ...one, side: "out" }))]);
        setText(statistics, stats ? statisticsText(stats.model_stats) : "");
        form.replaceChildren(inferForm(about.inputs, infer));
      } catch (error) {
        if (turn !== opened) return;
        signature.show([]);
        form.replaceChildren();
        setText(problem, error.message);
      }
    }

    async function infer(inputs) {
      setText(problem, "");
      const [name, version] = nameOf();
      const began = performance.now();
      try {
        const answer = await json(`${path(name, version)}/infer`, { method: "POST", body: { inputs } });
        const took = `${answer.model_name} ${answer.model_version ?? ""} answered in ${seconds((performance.now() - began) / 1e3)}`;
        outputs.replaceChildren(h("h3", {}, took), ...answer.outputs.map(tensorView));
        const stats = await json(`${path(name, version)}/stats`).catch(() => null);
        if (stats) setText(statistics, statisticsText(stats.model_stats));
      } catch (error) {
        outputs.replaceChildren();
        setText(problem, error.message);
      }
    }

    async function change(verb) {
      const name = typed.value.trim();
      if (!name) return;
      const text = verb === "load" ? `${name} is read again; what serves now goes on until that is done.` : `${name} takes no new requests; what runs goes on.`;
      if (await ask(`${verb === "load" ? "Load" : "Unload"} ${name}?`, text, { confirm: verb === "load" ? "Load it" : "Unload it", danger: verb !== "load" }) === null) return;
      await act(`/v2/repository/models/${encodeURIComponent(name)}/${verb}`, { method: "POST", body: {} }, `${name}: ${verb} is done.`);
    }

    async function act(where, options, done) {
      setText(problem, "");
      announce("It is under way.");
      try {
        await request(where, options);
        announce(done);
      } catch (error) {
        setText(problem, error.message);
      }
    }

    const setRule = (rule, done) => act(`/traffic/${encodeURIComponent(rule.name)}`, { method: "PUT", body: rule }, done);

    function update(sections) {
      state = { ...state, ...sections };
      if (sections.models) {
        const before = models.value;
        const ready = state.models.filter((row) => row.version && row.state === "READY");
        setOptions(models, ready.map((row) => `${row.name} version ${row.version}`));
        if (models.value !== before) open();
      }
      const reason = context.whyNot();
      setText(why, reason);
      for (const button of [load, unload]) button.disabled = Boolean(reason);
      if (sections.traffic && !rules.contains(document.activeElement)) rules.replaceChildren(...state.traffic.rules.map((one) => ruleForm(one, reason, setRule)));
    }

    const element = h(
      "div", {}, h("div", { class: "row" }, field("Model", models)), problem, signature.element, statistics,
      h("h2", {}, "Infer"), form, outputs,
      h("h2", {}, "Load and unload"), why, h("div", { class: "row" }, field("Model", typed), load, unload),
      h("h2", {}, "Weights and shifts"), h("p", { class: "soft" }, "Rules that are changed here last until the server ends."), rules,
    );
    return { element, update, looksAt: {} };
  },
};

const action = (title, click) => h("button", { type: "button", disabled: true, aria: { describedby: "why-no-change" }, on: { click } }, title);

/** A model's inputs as fields. `infer` gets the tensors. */
function inferForm(inputs, infer) {
  const fields = inputs.map((input) => new TensorField(input));
  const wrong = h("p", { class: "bad", role: "alert" });
  const submit = (event) => {
    event.preventDefault();
    setText(wrong, "");
    try {
      infer(fields.map((one) => one.tensor()));
    } catch (error) {
      setText(wrong, error.message);
    }
  };
  return h("form", { class: "panel", on: { submit } }, fields.map((one) => one.element), wrong, h("button", { type: "submit", class: "main" }, "Infer"));
}

/** An input, as JSON, as text, or of numbers with three axes or more as a picture. */
class TensorField {
  constructor({ name, datatype, shape }) {
    Object.assign(this, { name, datatype });
    const first = shape.map((size) => (size > 0 ? size : 1));
    this.shape = h("input", { type: "text", value: first.join(","), size: 14 });
    const text = datatype === "BYTES";
    this.data = h("textarea", { rows: 3, value: text ? "" : example(first, datatype) });
    this.isText = h("input", { type: "checkbox", checked: text });
    this.picture = h("input", { type: "file", accept: "image/*", on: { change: () => this.fillFrom(this.picture.files[0]) } });
    this.wrong = h("p", { class: "bad", role: "alert" });
    this.element = h(
      "fieldset", {}, h("legend", {}, `${name} (${datatype}, ${shape.join(" × ")})`),
      field("Shape", this.shape), field(text ? "Text" : "Data, as JSON", this.data),
      text && h("label", { class: "check" }, this.isText, "one text; off: a JSON list of texts"),
      !text && shape.length >= 3 && field("From a picture, as numbers from 0 to 1 (or 0 to 255 for UINT8)", this.picture),
      this.wrong,
    );
  }

  tensor() {
    const shape = this.shape.value.split(",").map((size) => Number(size.trim()));
    if (!shape.every((size) => Number.isInteger(size) && size >= 0)) throw new Error(`${this.name}: the shape is whole numbers with commas between them.`);
    if (this.datatype === "BYTES" && this.isText.checked) return { name: this.name, datatype: this.datatype, shape, data: [this.data.value] };
    let data;
    try {
      data = JSON.parse(this.data.value);
    } catch (error) {
      throw new Error(`${this.name}: ${error.message}`);
    }
    return { name: this.name, datatype: this.datatype, shape, data };
  }

  /** The picture in the size of the shape's last axes: channels first, unless the last axis has 1, 3 or 4. */
  async fillFrom(file) {
    if (!file) return;
    const sizes = this.shape.value.split(",").map(Number);
    const last = [1, 3, 4].includes(sizes.at(-1));
    const [channels, height, width] = last ? [sizes.at(-1), ...sizes.slice(-3, -1)] : sizes.slice(-3);
    setText(this.wrong, "");
    const bitmap = await createImageBitmap(file).catch(() => null);
    if (!bitmap) return setText(this.wrong, `${file.name} is no picture that this browser knows.`);
    const canvas = h("canvas", { width, height });
    const pen = canvas.getContext("2d");
    pen.drawImage(bitmap, 0, 0, width, height);
    const pixels = pen.getImageData(0, 0, width, height).data;
    const whole = this.datatype.startsWith("UINT") || this.datatype.startsWith("INT");
    const at = (channel, place) => {
      const [red, green, blue, alpha] = pixels.subarray(4 * place, 4 * place + 4);
      const value = channels === 1 ? Math.round(0.299 * red + 0.587 * green + 0.114 * blue) : [red, green, blue, alpha][channel];
      return whole ? value : Number((value / 255).toFixed(4));
    };
    const area = width * height;
    const data = Array.from({ length: channels * area }, (_, place) => (last ? at(place % channels, Math.floor(place / channels)) : at(Math.floor(place / area), place % area)));
    this.data.value = JSON.stringify(data);
    announce("The picture is in the field.");
  }
}

function example(shape, datatype) {
  const total = Math.min(64, shape.reduce((product, size) => product * size, 1));
  return JSON.stringify(Array.from({ length: total }, () => (datatype === "BOOL" ? false : 0)));
}

function tensorView({ name, datatype, shape, data }) {
  const texts = (data ?? []).slice(0, MOST_SHOWN).map((value) => (typeof value === "string" ? value : JSON.stringify(value)));
  const more = (data ?? []).length > MOST_SHOWN ? `\n… ${count(data.length - MOST_SHOWN)} more` : "";
  return h("div", {}, h("h3", {}, `${name} (${datatype}, ${shape.join(" × ")})`), h("pre", { tabIndex: 0 }, texts.join(datatype === "BYTES" ? "\n" : ", ") + more));
}

function statisticsText(versions) {
  return versions.map((one) => {
    const { success, fail, queue, compute_infer: compute } = one.inference_stats;
    const mean = (part) => seconds(part.count ? part.ns / part.count / 1e9 : null);
    return `version ${one.version}: ${count(one.inference_count)} inferences in ${count(one.execution_count)} executions, ${count(success.count)} requests answered in ${mean(success)}, ${count(fail.count)} failed; queue ${mean(queue)}, compute ${mean(compute)}`;
  }).join(" · ");
}

/** The weights of a public name's targets. */
function ruleForm(one, reason, setRule) {
  const { rule } = one;
  const inputs = rule.targets.map((target) => [target, h("input", { type: "number", min: 0, step: "any", value: target.weight ?? 1 })]);
  const withWeights = (weightOf) => ({ ...rule, shift: null, targets: inputs.map(([target, input]) => ({ ...target, weight: weightOf(target, input) })) });
  const confirmed = async (title, text, changed, done) => {
    if (await ask(title, text, { confirm: "Set it" }) !== null) await setRule(changed, done);
  };
  const submit = (event) => {
    event.preventDefault();
    const text = inputs.map(([target, input]) => `${idOf(target)} ${input.value}`).join(", ");
    confirmed(`Set the weights of ${rule.name}?`, `${text}.${rule.shift ? " Its shift ends." : ""}`, withWeights((_, input) => Number(input.value)), "The weights are set.");
  };
  const back = () => {
    const text = `All requests go to the other targets, and ${rule.shift.to} gets none.`;
    confirmed(`Shift ${rule.name} back?`, text, withWeights((target) => (idOf(target) === rule.shift.to ? 0 : target.weight ?? 1)), "The traffic is shifted back.");
  };
  const again = () => confirmed(`Begin the shift of ${rule.name} again?`, `To ${rule.shift.to}, from its first step on.`, rule, "The shift begins.");
  const off = Boolean(reason);
  return h(
    "form", { class: "panel", on: { submit } }, h("h3", {}, rule.name),
    h("div", { class: "row" }, inputs.map(([target, input]) => field(`${idOf(target)}: ${(100 * (one.targets.find((known) => known.target === idOf(target))?.share ?? 0)).toFixed(1)} %`, input))),
    rule.shift && h("p", {}, shiftOf(one, { target: rule.shift.to })),
    h("p", { class: "row" }, h("button", { type: "submit", disabled: off }, "Set weights"),
      rule.shift && h("button", { type: "button", class: "danger", disabled: off, on: { click: back } }, "Shift back"),
      rule.shift && h("button", { type: "button", disabled: off, on: { click: again } }, "Begin the shift again")),
  );
}

const idOf = (target) => (target.version ? `${target.model}/${target.version}` : target.model);
