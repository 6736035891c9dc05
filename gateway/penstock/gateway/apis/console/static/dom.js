/** Elements. What comes from a server, a model or a person only ever becomes a text node or a property: never markup. */

/**
 * An element. Properties are set as properties; those of `on` are listeners, those of `aria` and `data` attributes, and
 * `class` is the class. Children are nodes or texts; null and false are left out.
 */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name === "on") for (const [event, listen] of Object.entries(value)) element.addEventListener(event, listen);
    else if (name === "aria") for (const [key, text] of Object.entries(value)) element.setAttribute(`aria-${key}`, text);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "class") element.className = value;
    else if (name === "role" || name === "scope" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Replaces what an element has, unless its text would stay the same. */
export function setText(element, text) {
  const value = String(text);
  if (element.textContent !== value) element.textContent = value;
}

/**
 * A table whose rows live as long as what they show, so that focus and selection stay where they are.
 * `columns`: [title, cell(row) -> text or node, "n" for numbers]. Give rows to `show`, each with a key.
 */
export function table(caption, columns, keyOf) {
  const body = h("tbody");
  const known = new Map();
  const heads = columns.map(([title, , kind]) => h("th", { scope: "col", class: kind ?? "" }, title));
  const element = h(
    "div", { class: "scroll", tabIndex: 0, role: "region", aria: { label: caption } },
    h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, heads)), body),
  );
  const show = (rows) => {
    const present = new Set();
    rows.forEach((row, place) => {
      const key = keyOf(row);
      if (present.has(key)) return;
      present.add(key);
      let line = known.get(key);
      if (!line) known.set(key, (line = h("tr", {}, columns.map(([, , kind]) => h("td", { class: kind ?? "" })))));
      columns.forEach(([, cell], column) => fill(line.children[column], cell(row)));
      if (body.children[place] !== line) body.insertBefore(line, body.children[place] ?? null);
    });
    for (const [key, line] of known) {
      if (present.has(key)) continue;
      line.remove();
      known.delete(key);
    }
  };
  return { element, show };
}

/** A cell's text, or its node where that is another one than before: nodes say what they show in `data-as`. */
function fill(cell, content) {
  if (!(content instanceof Node)) return setText(cell, content ?? "");
  const old = cell.firstElementChild;
  if (old && old.dataset.as !== undefined && old.dataset.as === content.dataset?.as) return;
  cell.replaceChildren(content);
}

/** A field with its label, which is its name, too: a choice's options are not part of that. */
export function field(label, input) {
  input.setAttribute("aria-label", label);
  return h("label", {}, label, input);
}

/** A choice among texts. */
export const select = (options, properties = {}) => {
  const element = h("select", properties);
  setOptions(element, options);
  return element;
};

/** Other options; what was chosen stays chosen if it is still there. */
export function setOptions(element, options) {
  const texts = [...element.options].map((option) => option.value);
  if (texts.length === options.length && texts.every((text, place) => text === options[place])) return;
  const before = element.value;
  element.replaceChildren(...options.map((text) => h("option", { value: text }, text || "(none)")));
  if (options.includes(before)) element.value = before;
}

/** Tells those who listen and do not see. */
export const announce = (text) => setText(document.getElementById("announce"), text);

/** Asks in a dialog. Returns the typed text, "" where none is wanted, or null where it was dismissed. */
export function ask(title, text, { confirm = "OK", input = null, danger = false } = {}) {
  return new Promise((resolve) => {
    const typed = input ? h("input", { type: input.type ?? "text", autocomplete: "off", value: input.value ?? "" }) : null;
    const end = (value) => { dialog.close(); dialog.remove(); resolve(value); };
    const yes = h("button", { type: "submit", class: danger ? "danger" : "main" }, confirm);
    const no = h("button", { type: "button", on: { click: () => end(null) } }, "Back");
    const accept = (event) => { event.preventDefault(); end(typed ? typed.value : ""); };
    const dialog = h(
      "dialog", { aria: { label: title }, on: { cancel: () => end(null) } },
      h("form", { on: { submit: accept } }, h("h2", {}, title), h("p", {}, text),
        typed && field(input.label, typed), h("p", { class: "row" }, yes, no)),
    );
    document.body.append(dialog);
    dialog.showModal();
    (typed ?? no).focus();
  });
}
