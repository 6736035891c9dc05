/** The frame of the console: pages, theme, key, and what all pages know. */

import { announce, ask, h, setText } from "/console/dom.js";
import { Feed } from "/console/feed.js";
import { live } from "/console/live.js";
import { overview } from "/console/overview.js";
import { playground } from "/console/playground.js";
import { requests } from "/console/requests.js";
import { hasKey, setKey } from "/console/session.js";
import { tensors } from "/console/tensors.js";

/** Each has a title, and `open(context)`, which returns an element, what to look at, and `update(sections)`. */
const PAGES = { overview, live, request: requests, playground, tensors };
const THEMES = ["auto", "light", "dark"];

const byId = (id) => document.getElementById(id);
const state = {};
let page = null;
let isLost = false;

/** What pages may use of the frame. `state` has the newest of each section. */
const context = {
  state,
  look: (what) => feed.look(page.name, what),
  notice,
  /** Why an action is not possible now; "" where it is. */
  whyNot() {
    if (state.server && !state.server.may_act) return "This server has no keys: its console is read-only.";
    return hasKey() ? "" : "This needs an admin's key.";
  },
  parts: () => location.hash.slice(1).split("/").slice(2).map(decodeURIComponent),
};

const feed = new Feed(update, told);

function update(sections) {
  Object.assign(state, sections);
  if (sections.server) status();
  page?.update(sections);
}

function told(what, reason) {
  if (what === "live") {
    if (isLost) announce("The server is back.");
    isLost = false;
    return notice("");
  }
  isLost = what === "lost";
  setPill(what === "lost" ? "no connection" : "no access", "bad");
  notice(what === "lost" ? `No live data: ${reason}. It is tried again.` : `${reason} Press Key to type one.`);
}

function notice(text) {
  byId("notice").hidden = !text;
  setText(byId("notice"), text);
}

function status() {
  const { live: alive, ready, leaving } = state.server;
  if (!alive) setPill("dead", "bad");
  else if (leaving) setPill("draining", "warn");
  else setPill(ready ? "ready" : "not ready", ready ? "good" : "warn");
}

function setPill(text, kind) {
  const pill = byId("status");
  pill.className = `pill ${kind}`;
  setText(pill, text);
}

function open() {
  const name = location.hash.split("/")[1] in PAGES ? location.hash.split("/")[1] : "overview";
  page?.close?.();
  page = { name, update() {} };
  const opened = PAGES[name].open(context);
  page = { name, ...opened };
  document.title = `${PAGES[name].title} – Penstock console`;
  byId("main").replaceChildren(h("h1", {}, PAGES[name].title), opened.element);
  for (const link of byId("nav").children) {
    if (link.dataset.page === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  feed.look(name, opened.looksAt);
  if (Object.keys(state).length) page.update(state);
}

function theme(name) {
  const dark = name === "dark" || (name === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  setText(byId("theme"), `Theme: ${name}`);
}

const storedTheme = () => {
  try {
    return THEMES.includes(localStorage.theme) ? localStorage.theme : "auto";
  } catch {
    return "auto";
  }
};

byId("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(storedTheme()) + 1) % THEMES.length];
  try {
    localStorage.theme = next;
  } catch { /* without storage the choice lasts as long as the page */ }
  theme(next);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme(storedTheme()));

byId("key").addEventListener("click", async () => {
  const text = "It stays in this page's memory, and goes with the page.";
  const typed = await ask("API key", text, { confirm: "Use it", input: { type: "password", label: "Key" } });
  if (typed === null) return;
  setKey(typed);
  setText(byId("key"), hasKey() ? "Key is set" : "Key");
  open();
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, dialog")) return;
  const name = Object.keys(PAGES)[Number(event.key) - 1];
  if (name) location.hash = `#/${name}`;
});

byId("nav").append(
  ...Object.entries(PAGES).map(([name, { title }], place) =>
    h("a", { href: `#/${name}`, data: { page: name }, title: `Key ${place + 1}` }, title)),
);
addEventListener("hashchange", () => { open(); scrollTo(0, 0); byId("main").focus({ preventScroll: true }); });
theme(storedTheme());
open();
