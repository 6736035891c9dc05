/** Chats with one model or two side by side. */

import { announce, field, h, select, setOptions, setText } from "/console/dom.js";
import { seconds } from "/console/format.js";
import { events, json, request } from "/console/session.js";

const PATH = "/v1/chat/completions";

export const playground = {
  title: "Playground",
  open(context) {
    const system = h("textarea", { rows: 2 });
    const prompt = h("textarea", { rows: 4, value: "" });
    const picture = h("input", { type: "file", accept: "image/*" });
    const numbers = Object.fromEntries([["temperature", "1"], ["top_p", "1"], ["max_tokens", "256"], ["seed", ""]].map(
      ([name, value]) => [name, h("input", { type: "number", step: "any", value })]));
    const tools = h("textarea", { rows: 4, placeholder: '[{"type": "function", "function": {"name": "weather", "parameters": {…}}}]' });
    const schema = h("textarea", { rows: 4, placeholder: '{"type": "object", "properties": {…}}' });
    const colours = h("input", { type: "checkbox" });
    const both = h("input", { type: "checkbox", on: { change: () => { panes[1].element.hidden = !both.checked; } } });
    const problem = h("p", { class: "bad", role: "alert" });
    const panes = [new Pane("Answer"), new Pane("Second answer")];
    panes[1].element.hidden = true;
    const go = h("button", { type: "submit", class: "main" }, "Send");
    const stop = h("button", { type: "button", on: { click: () => panes.forEach((pane) => pane.stop()) } }, "Stop");
    const clear = h("button", { type: "button", on: { click: () => panes.forEach((pane) => pane.clear()) } }, "New chat");

    /** The request's body without model and messages. Raises SyntaxError, with the field's name. */
    function parameters() {
      const body = { stream: true, stream_options: { include_usage: true } };
      for (const [name, input] of Object.entries(numbers)) if (input.value !== "") body[name] = Number(input.value);
      if (colours.checked) Object.assign(body, { logprobs: true, top_logprobs: 5 });
      if (tools.value.trim()) body.tools = parsed("Tools", tools.value);
      if (schema.value.trim()) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parsed("JSON schema", schema.value) } };
      return body;
    }

    async function content() {
      const file = picture.files[0];
      if (!file) return prompt.value;
      return [{ type: "text", text: prompt.value }, { type: "image_url", image_url: { url: await dataUrl(file) } }];
    }

    async function submit(event) {
      event.preventDefault();
      setText(problem, "");
      try {
        const body = parameters(), message = { role: "user", content: await content() };
        await Promise.all(shown().map((pane) => pane.send(body, system.value, [message])));
        announce("The answer is complete.");
      } catch (error) {
        setText(problem, error.message);
      }
    }

    const shown = () => panes.filter((pane) => !pane.element.hidden);
    for (const pane of panes) pane.parameters = () => [parameters(), system.value];

    async function listModels() {
      try {
        const { data } = await json("/v1/models");
        const chats = data.filter((model) => model.capabilities.includes("chat"));
        for (const pane of panes) setOptions(pane.models, chats.map((model) => model.id));
        if (chats.length > 1 && panes[1].models.value === panes[0].models.value) panes[1].models.selectedIndex = 1;
        const sees = chats.some((model) => model.capabilities.includes("vision") || model.owned_by !== "penstock");
        picture.closest("label").hidden = !sees;
        if (!chats.length) setText(problem, "No model here has a chat template.");
      } catch (error) {
        setText(problem, error.message);
      }
    }

    const form = h(
      "form", { class: "panel", on: { submit } },
      field("System prompt", system), field("Your message", prompt), field("Picture", picture),
      h("div", { class: "row" }, Object.entries(numbers).map(([name, input]) => field(name, input))),
      h("details", {}, h("summary", {}, "Tools and JSON schema"), field("Tools, as a JSON list", tools), field("JSON schema of the answer", schema)),
      h("label", { class: "check" }, colours, "Colour tokens by their probability"),
      h("label", { class: "check" }, both, "Two models side by side"),
      h("p", { class: "row" }, go, stop, clear), problem,
    );
    prompt.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit(); });
    listModels();
    let known = "";
    const update = (sections) => {
      const names = JSON.stringify(sections.models?.map((row) => [row.name, row.state]) ?? known);
      if (sections.models && known && names !== known) listModels();
      if (sections.models) known = names;
    };
    const element = h("div", { class: "grid" }, form, panes.map((pane) => pane.element));
    return { element, update, looksAt: {}, close: () => panes.forEach((pane) => pane.stop()) };
  },
};

/** One model's side of the chat. */
class Pane {
  constructor(title) {
    this.models = select([]);
    this.turns = h("div", {});
    this.facts = h("p", { class: "soft" });
    this.messages = [];
    this.abort = null;
    this.last = null;
    const copy = (kind, write) => h("button", { type: "button", on: { click: () => this.copy(write) } }, `Copy as ${kind}`);
    this.element = h("section", { class: "panel", aria: { label: title } }, h("h2", {}, title), field("Model", this.models),
      this.turns, this.facts, h("p", { class: "row" }, copy("curl", asCurl), copy("Python", asPython)));
  }

  stop() { this.abort?.abort(); }

  clear() {
    this.stop();
    this.messages = [];
    this.turns.replaceChildren();
    setText(this.facts, "");
  }

  /** Sends the chat with these messages behind it, and shows the answer as it comes. */
  async send(parameters, system, messages) {
    this.stop();
    this.messages.push(...messages);
    for (const message of messages) this.turns.append(turn(message.role, textOf(message.content)));
    const body = { model: this.models.value, messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages], ...parameters };
    this.last = body;
    this.abort = new AbortController();
    const answer = new Answer(this.turns);
    const began = performance.now();
    let first = null;
    try {
      const response = await request(PATH, { method: "POST", body, signal: this.abort.signal });
      for await (const event of events(response)) {
        if (event.error) throw new Error(event.error.message);
        if (answer.add(event) && first === null) first = performance.now();
      }
    } catch (error) {
      if (error.name !== "AbortError") {
        answer.fail(error.message);
        throw error;
      }
    } finally {
      const took = (performance.now() - began) / 1e3;
      const { usage } = answer;
      const speed = usage && first ? `, ${(usage.completion_tokens / Math.max(1e-3, took - (first - began) / 1e3)).toFixed(1)} tokens/s` : "";
      const tokens = usage ? `${usage.prompt_tokens} prompt tokens (${usage.prompt_tokens_details?.cached_tokens ?? 0} cached), ${usage.completion_tokens} of output, ` : "";
      setText(this.facts, `${tokens}first token ${seconds(first === null ? null : (first - began) / 1e3)}, together ${seconds(took)}${speed}${answer.finish ? `, finished: ${answer.finish}` : ""}`);
    }
    const said = answer.message();
    this.messages.push(said);
    if (said.tool_calls) this.turns.append(this.toolForm(said.tool_calls));
  }

  /** Fields for what the tools give, which goes back to the model. */
  toolForm(calls) {
    const inputs = calls.map((call) => [call, h("textarea", { rows: 2 })]);
    const submit = async (event) => {
      event.preventDefault();
      form.remove();
      try {
        const messages = inputs.map(([call, input]) => ({ role: "tool", tool_call_id: call.id, content: input.value }));
        await this.send(...this.parameters(), messages);
      } catch { /* the answer shows it */ }
    };
    const form = h("form", { class: "turn tool", on: { submit } },
      inputs.map(([call, input]) => field(`Output of ${call.function.name}(${call.function.arguments})`, input)), h("button", { type: "submit" }, "Send the tools' output"));
    return form;
  }

  async copy(write) {
    let body = this.last;
    if (!body) {
      const [parameters, system] = this.parameters();
      body = { model: this.models.value, messages: system ? [{ role: "system", content: system }] : [], ...parameters };
    }
    const text = write(body);
    try {
      await navigator.clipboard.writeText(text);
      announce("Copied.");
    } catch {
      announce("It is below.");
    }
    this.element.querySelector("pre.copied")?.remove();
    this.element.append(h("pre", { class: "copied", tabIndex: 0 }, text));
  }
}

/** An answer that comes in pieces. */
class Answer {
  constructor(turns) {
    this.thought = h("pre", {});
    this.thoughts = h("details", { hidden: true }, h("summary", {}, "Thoughts"), this.thought);
    this.text = h("div", { class: "answer", aria: { live: "off" } });
    this.said = "";
    this.calls = [];
    this.callsShown = h("div", {});
    this.finish = "";
    this.usage = null;
    turns.append(h("div", { class: "turn" }, this.thoughts, this.text, this.callsShown));
  }

  /** Whether it had something to show. */
  add(event) {
    if (event.usage) this.usage = event.usage;
    const [choice] = event.choices ?? [];
    if (!choice) return false;
    const { delta } = choice;
    const thought = delta.reasoning_content ?? delta.reasoning;
    if (thought) {
      this.thoughts.hidden = false;
      this.thought.append(thought);
    }
    const tokens = choice.logprobs?.content;
    // a token that ends the answer has a probability and is no part of its text
    if (tokens?.length && delta.content) this.text.append(...tokens.map(coloured));
    else if (delta.content) this.text.append(delta.content);
    this.said += delta.content ?? "";
    for (const piece of delta.tool_calls ?? []) this.addCall(piece);
    if (choice.finish_reason) this.finish = choice.finish_reason;
    return Boolean(delta.content || thought || delta.tool_calls);
  }

  addCall(piece) {
    const call = (this.calls[piece.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    if (piece.id) call.id = piece.id;
    call.function.name += piece.function?.name ?? "";
    call.function.arguments += piece.function?.arguments ?? "";
    this.callsShown.replaceChildren(...this.calls.map((one) => h("pre", { class: "turn tool" }, `${one.function.name}(${one.function.arguments})`)));
  }

  fail(text) { this.text.append(h("p", { class: "bad" }, text)); }

  message() {
    const said = { role: "assistant", content: this.said };
    return this.calls.length ? { ...said, tool_calls: this.calls } : said;
  }
}

function coloured({ token, logprob, top_logprobs: top }) {
  const chance = Math.exp(logprob);
  const kind = chance > 0.9 ? "p9" : chance > 0.7 ? "p7" : chance > 0.5 ? "p5" : chance > 0.3 ? "p3" : "p0";
  const others = (top ?? []).map((one) => `${JSON.stringify(one.token)} ${(100 * Math.exp(one.logprob)).toFixed(1)} %`).join("\n");
  return h("span", { class: `token ${kind}`, title: `${(100 * chance).toFixed(1)} %\n${others}` }, token);
}

const turn = (role, text) => h("div", { class: `turn ${role}` }, h("span", { class: "soft" }, role === "tool" ? "tool" : "you"), h("div", { class: "answer" }, text));

const textOf = (content) => (typeof content === "string" ? content : `${content[0].text} [a picture]`);

function parsed(name, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SyntaxError(`${name}: ${error.message}`);
  }
}

export const dataUrl = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});

const shell = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** The key is never in it. */
export function asCurl(body) {
  const lines = [`curl -N ${location.origin}${PATH}`, "-H 'Content-Type: application/json'", '-H "Authorization: Bearer $PENSTOCK_API_KEY"'];
  return [...lines, `-d ${shell(JSON.stringify(body))}`].join(" \\\n  ");
}

export function asPython(body) {
  const values = Object.entries(body).map(([name, value]) => `    ${name}=${pythonLiteral(value)},`);
  return [
    "import os", "", "from openai import OpenAI", "",
    `client = OpenAI(base_url=${JSON.stringify(`${location.origin}/v1`)}, api_key=os.environ.get("PENSTOCK_API_KEY", "none"))`,
    "stream = client.chat.completions.create(", ...values, ")", "for chunk in stream:",
    "    if chunk.choices and chunk.choices[0].delta.content:", '        print(chunk.choices[0].delta.content, end="", flush=True)',
  ].join("\n");
}

function pythonLiteral(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(pythonLiteral).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([key, one]) => `${JSON.stringify(key)}: ${pythonLiteral(one)}`).join(", ")}}`;
  return JSON.stringify(value);
}
