/** Drawings on canvas. Each has a text for those who do not see it. */

import { h } from "/console/dom.js";

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** A canvas in a figure. `draw(pen, width, height)` is called when `show` is; `text` says the same in words. */
function drawing(title, className = "") {
  const canvas = h("canvas", { class: className, role: "img", aria: { label: title } });
  const element = h("figure", { class: "panel" }, h("figcaption", {}, title), canvas);
  const paint = (draw, text) => {
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (!width) return;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px system-ui, sans-serif";
    draw(pen, width, height);
    canvas.setAttribute("aria-label", `${title}: ${text}`);
  };
  return { element, paint };
}

function scale(pen, width, height, most, write) {
  pen.strokeStyle = color("line");
  pen.fillStyle = color("soft");
  pen.lineWidth = 1;
  for (const part of [0, 0.5, 1]) {
    const y = height - 14 - part * (height - 28) + 0.5;
    pen.beginPath();
    pen.moveTo(0, Math.round(y) + 0.5);
    pen.lineTo(width, Math.round(y) + 0.5);
    pen.stroke();
    if (part) pen.fillText(write(part * most), 2, y - 2);
  }
}

/** Lines over the last `span` seconds. `series`: [name, color]; `show(points, write)`: [time, value or null ...]. */
export function linePlot(title, series, span = 120) {
  const { element, paint } = drawing(title);
  element.append(h("ul", { class: "legend" }, series.map(([name, tint]) => h("li", {}, h("i", { class: `is-${tint}` }), name))));
  const show = (points, write) => {
    const now = points.length ? points.at(-1)[0] : 0;
    const recent = points.filter(([at]) => at >= now - span);
    const most = 1.1 * Math.max(1e-9, ...recent.flatMap(([, ...values]) => values.filter((value) => value !== null)));
    const last = points.at(-1) ?? [];
    const text = series.map(([name], place) => `${name} ${last[place + 1] == null ? "unknown" : write(last[place + 1])}`).join(", ");
    paint((pen, width, height) => {
      scale(pen, width, height, most, write);
      series.forEach(([, tint], place) => {
        pen.strokeStyle = color(tint);
        pen.lineWidth = 1.8;
        pen.beginPath();
        let drawn = false;
        for (const [at, ...values] of recent) {
          const value = values[place];
          if (value === null || value === undefined) continue;
          const x = width - ((now - at) / span) * width;
          const y = height - 14 - (value / most) * (height - 28);
          if (drawn) pen.lineTo(x, y);
          else pen.moveTo(x, y);
          drawn = true;
        }
        pen.stroke();
      });
    }, text);
  };
  return { element, show };
}

/** Steps as bars of tokens, their times as a line, and the target. `show(steps, target, write)`; a step is
 * {prompt, tokens, seconds}. */
export function stepTimeline(title) {
  const { element, paint } = drawing(title);
  const names = [["prompt tokens", "prefill"], ["generated tokens", "decode"], ["time of the step", "shared"]];
  element.append(h("ul", { class: "legend" }, names.map(([name, tint]) => h("li", {}, h("i", { class: `is-${tint}` }), name))));
  const show = (steps, target, write) => {
    const last = steps.at(-1);
    const text = last ? `the last step had ${last.prompt} prompt and ${last.tokens - last.prompt} other tokens in ${write(last.seconds)}` : "no steps yet";
    paint((pen, width, height) => {
      const shown = steps.slice(-Math.floor(width / 5));
      const most = Math.max(1, ...shown.map((step) => step.tokens));
      const slowest = Math.max(1e-6, ...shown.map((step) => step.seconds));
      const near = target && target < 4 * slowest;
      const longest = 1.15 * Math.max(slowest, near ? target : 0);
      scale(pen, width, height, most, (value) => Math.round(value).toString());
      const room = height - 28;
      shown.forEach((step, place) => {
        const x = width - (shown.length - place) * 5;
        const whole = (step.tokens / most) * room, part = (step.prompt / most) * room;
        pen.fillStyle = color("decode");
        pen.fillRect(x, height - 14 - whole, 4, whole - part);
        pen.fillStyle = color("prefill");
        pen.fillRect(x, height - 14 - part, 4, part);
      });
      pen.strokeStyle = color("shared");
      pen.lineWidth = 1.5;
      pen.beginPath();
      shown.forEach((step, place) => pen.lineTo(width - (shown.length - place) * 5 + 2, height - 14 - (step.seconds / longest) * room));
      pen.stroke();
      if (target && !near) {
        pen.fillStyle = color("soft");
        pen.fillText(`far below the target of ${write(target)}`, width - 190, 11);
      }
      if (!near) return;
      const y = height - 14 - (target / longest) * room;
      pen.setLineDash([4, 4]);
      pen.strokeStyle = color("bad");
      pen.beginPath();
      pen.moveTo(0, y);
      pen.lineTo(width, y);
      pen.stroke();
      pen.setLineDash([]);
      pen.fillStyle = color("bad");
      pen.fillText(`target ${write(target)}`, width - 90, y - 3);
    }, text);
  };
  return { element, show };
}

const KINDS = { ".": "blank", c: "cached", u: "used", s: "shared" };

/** The blocks of a KV cache, of which each cell stands for `stride`. `show(cells, text)`: runs such as "12u3.". */
export function blockMap(title) {
  const { element, paint } = drawing(title, "map");
  const show = (cells, text) => {
    const runs = [...cells.matchAll(/(\d+)([.cus])/g)].map(([, length, kind]) => [Number(length), KINDS[kind]]);
    const total = runs.reduce((sum, [length]) => sum + length, 0);
    paint((pen, width, height) => {
      if (!total) return;
      const columns = Math.max(1, Math.ceil(Math.sqrt((total * width) / height)));
      const size = Math.min(width / columns, height / Math.ceil(total / columns), 16);
      const gap = size > 4 ? 1 : 0;
      let place = 0;
      for (const [length, kind] of runs) {
        pen.fillStyle = color(kind);
        for (let end = place + length; place < end; place += 1) {
          pen.fillRect((place % columns) * size, Math.floor(place / columns) * size, size - gap, size - gap);
        }
      }
    }, text);
  };
  return { element, show };
}
