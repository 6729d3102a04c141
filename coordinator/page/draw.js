// Words and shapes from plain values. Everything becomes text nodes and attributes: nothing here reads markup.
"use strict";

const $ = (id) => document.getElementById(id);

const CHART_PIXELS = 210; // without the legend beneath, which takes as many lines as a narrow window needs

function make(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "text") node.textContent = value;
    else if (name === "class") node.className = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function count(value) {
  return value == null || !Number.isFinite(value) ? "–" : Math.round(value).toLocaleString("en");
}

function many(value, word) {
  return `${count(value)} ${word}${value === 1 ? "" : "s"}`;
}

function short(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= size) return (value / (letter === "k" ? 1e3 : size)).toFixed(1) + " " + letter;
  }
  return value >= 100 || Number.isInteger(value) ? count(value) : value.toFixed(1);
}

function digits(value, places) {
  return value == null || !Number.isFinite(value) ? "–" : value.toFixed(places);
}

function share(value) {
  return value == null ? "–" : (100 * value).toFixed(0) + " %";
}

function time(seconds) {
  if (seconds == null || !Number.isFinite(seconds)) return "–";
  if (seconds < 1) return (1000 * seconds).toFixed(0) + " ms";
  if (seconds < 10) return seconds.toFixed(1) + " s";
  if (seconds < 90) return seconds.toFixed(0) + " s";
  if (seconds < 5400) return (seconds / 60).toFixed(0) + " min";
  if (seconds < 172800) return (seconds / 3600).toFixed(1) + " h";
  return (seconds / 86400).toFixed(1) + " days";
}

function clock(wall) {
  const when = new Date(1000 * wall);
  const day = when.toDateString() === new Date().toDateString() ? "" : when.toLocaleDateString() + " ";
  return day + when.toLocaleTimeString("en-GB");
}

// Keeps a list of children as long as `items`, and lets `fill` change only what differs.
function keep(parent, items, create, fill) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  while (parent.children.length < items.length) parent.append(create());
  items.forEach((item, index) => fill(parent.children[index], item));
}

// A row of cells, made once; the cells are `row.cells` of our own.
function cells(tag, kinds, cell) {
  const row = make(tag);
  row.own = kinds.map((kind) => make(cell, kind));
  row.append(...row.own);
  return row;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// One chart with its own size: x are steps. `lines`: [label, colour's name, digits, width, whether it has few points].
class Chart {
  constructor(place, lines, range) {
    this.place = place;
    this.lines = lines;
    this.range = range;
    this.data = null;
    new ResizeObserver(() => this.resize()).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.anew());
  }

  anew() {
    if (this.plot) this.plot.destroy();
    this.plot = null;
    if (this.data) this.show(this.data);
  }

  size() {
    return { width: Math.max(200, this.place.clientWidth), height: CHART_PIXELS };
  }

  resize() {
    if (this.plot) this.plot.setSize(this.size());
  }

  show(data) {
    this.data = data;
    if (this.plot) {
      this.plot.setData(data);
      return;
    }
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
    const wanted = {
      ...this.size(),
      cursor: { y: false },
      scales: { x: { time: false }, y: { range: this.range } },
      axes: [{ ...axis, size: 32, values: (_, ticks) => ticks.map(short) }, { ...axis, size: 58, values: (_, ticks) => ticks.map((v) => (v >= 1000 ? short(v) : String(+v.toFixed(3)))) }],
      series: [
        { label: "step", value: (_, v) => count(v) },
        ...this.lines.map(([label, name, places, width, few]) => ({
          label, stroke: colour(name), width: width ?? 1.5, spanGaps: few === true, points: { show: few === true, size: 6 },
          value: (_, v) => (v == null ? "–" : v.toFixed(places)),
        })),
      ],
      bands: this.lines.length > 2 ? [{ series: [3, 2], fill: colour("--fill") }] : [],
    };
    this.plot = new uPlot(wanted, data, this.place);
  }
}
