// Charts of the last ten minutes. A chart is drawn once it comes into view, and again when it has another point.

import { clock, element, setText } from "./format.js";

const SPAN = 600; // seconds
const MOST = 200; // points that are kept
const HEIGHT = 112;

const style = () => getComputedStyle(document.documentElement);
const colour = (name) => style().getPropertyValue(name).trim();

// Times, and values by series; what a new server does not know is kept from the one before it.
export class Store {
  constructor() {
    this.times = [];
    this.series = new Map();
    this.last = null;
  }

  add(event, rows) {
    if (!event.times.length) return;
    const first = event.times[0];
    let keep = this.times.length;
    while (keep && this.times[keep - 1] >= first - 0.5) keep -= 1;
    const gap = keep && first - this.times[keep - 1] > 12 ? [first - 5] : [];
    const before = this.times.slice(0, keep).concat(gap);
    const times = before.concat(event.times);
    const drop = Math.max(0, times.length - MOST);
    const series = new Map();
    for (const [key, values] of rows) {
      const old = (this.series.get(key) ?? []).slice(0, keep);
      while (old.length < before.length) old.push(null);
      series.set(key, old.concat(values).slice(drop));
    }
    this.series = series;
    this.times = times.slice(drop);
  }

  of(keys) {
    const blank = () => this.times.map(() => null);
    return [this.times, ...keys.map((key) => this.series.get(key) ?? blank())];
  }
}

// title: what it shows. lines: [{key, label, colour, fill}]. show: a value as text. limit: () => a line to draw, or null.
// top: of the scale, where that is fixed; else least: its top at least.
export class Chart {
  constructor(store, title, lines, show, { limit = () => null, top = null, least = 1 } = {}) {
    Object.assign(this, { store, title, lines, show, limit, top, least });
    this.plot = null;
    this.visible = false;
    this.caption = element("span", "reading");
    const legend = element("span", "legend");
    for (const line of lines) {
      const key = element("i");
      key.dataset.colour = line.colour;
      legend.append(element("span", "", key, line.label));
    }
    this.box = element("div", "plot");
    this.box.setAttribute("role", "img");
    this.element = element("figure", "chart", element("figcaption", "", element("b", "", title), legend, this.caption), this.box);
    watching.set(this.box, this);
    views.observe(this.box);
    sizes.observe(this.box);
  }

  draw() {
    if (!this.visible || !this.box.clientWidth) return;
    const data = this.store.of(this.lines.map((line) => line.key));
    const limit = this.limit();
    data.push(data[0].map(() => limit));
    if (this.plot === null) this.plot = this.make(data);
    else this.plot.setData(data);
    this.describe(data);
  }

  // What a picture says, in words.
  describe(data) {
    const told = this.lines.map((line, index) => {
      const values = data[index + 1].filter((value) => value !== null);
      if (!values.length) return `${line.label}: nothing yet`;
      return `${line.label}: now ${this.show(values.at(-1))}, at most ${this.show(Math.max(...values))}`;
    });
    const limit = this.limit();
    if (limit !== null) told.push(`target ${this.show(limit)}`);
    this.box.setAttribute("aria-label", `${this.title}, last ten minutes. ${told.join("; ")}`);
  }

  make(data) {
    const grid = { stroke: colour("--grid"), width: 1 };
    const axis = { stroke: colour("--faint"), font: "11px system-ui, sans-serif", ticks: { show: false }, grid };
    const series = this.lines.map((line) => ({
      label: line.label,
      stroke: colour(line.colour),
      width: 1.75,
      fill: line.fill ? colour(line.fill) : undefined,
      points: { show: false },
    }));
    series.push({ stroke: colour("--bad"), width: 1.25, dash: [5, 4], points: { show: false } });
    return new uPlot(
      {
        width: this.box.clientWidth,
        height: HEIGHT,
        padding: [8, 6, 0, 0],
        legend: { show: false },
        cursor: { y: false, drag: { setScale: false, x: false }, points: { size: 6 } },
        scales: {
          x: { time: true, range: () => this.window() },
          y: { range: (plot, low, high) => [0, this.top ?? Math.max((high ?? 0) * 1.12, this.floor())] },
        },
        axes: [
          { ...axis, size: 22, space: 70, values: (plot, marks) => marks.map((mark) => clock(mark).slice(0, 5)), grid: { show: false } },
          { ...axis, size: 54, space: 30, values: (plot, marks) => marks.map((mark) => this.show(mark)) },
        ],
        series: [{}, ...series],
        hooks: { setCursor: [(plot) => this.read(plot)] },
      },
      data,
      this.box,
    );
  }

  window() {
    const end = this.store.times.at(-1) ?? Date.now() / 1000;
    return [end - SPAN, end];
  }

  floor() {
    return this.limit() ? this.limit() * 0.2 : this.least;
  }

  read(plot) {
    const index = plot.cursor.idx;
    this.element.classList.toggle("read", index !== null && index !== undefined);
    if (index === null || index === undefined) return setText(this.caption, "");
    const values = this.lines.map((line, number) => {
      const value = plot.data[number + 1][index];
      return value === null ? null : `${line.label} ${this.show(value)}`;
    });
    setText(this.caption, [clock(plot.data[0][index]), ...values.filter(Boolean)].join(" · "));
  }

  close() {
    views.unobserve(this.box);
    sizes.unobserve(this.box);
    watching.delete(this.box);
    this.plot?.destroy();
  }
}

const watching = new Map();
const views = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      const chart = watching.get(target);
      if (!chart) continue;
      chart.visible = isIntersecting;
      chart.draw();
    }
  },
  { rootMargin: "200px" },
);
const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const chart = watching.get(target);
    if (chart?.plot && target.clientWidth) chart.plot.setSize({ width: target.clientWidth, height: HEIGHT });
    else chart?.draw();
  }
});

export function drawAll() {
  for (const chart of watching.values()) chart.draw();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of watching.values()) {
    chart.plot?.destroy();
    chart.plot = null;
    chart.draw();
  }
});
