"use strict";
// Charts as SVG, tables that sort, light and dark. Text from the data only ever becomes textContent.
(() => {
  const DASHES = { "-": null, "--": "7 4", ":": "2 4", "-.": "8 3 2 3" };
  const MARKERS = {
    o: (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`,
    s: (r) => `M${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
    D: (r) => `M0,${-1.35 * r}L${1.35 * r},0L0,${1.35 * r}L${-1.35 * r},0z`,
    "^": (r) => `M0,${-1.2 * r}L${1.2 * r},${r}H${-1.2 * r}z`,
    v: (r) => `M0,${1.2 * r}L${1.2 * r},${-r}H${-1.2 * r}z`,
  };
  const MOST_MARKERS = 40;
  const [X, Y, LOW, HIGH, LABEL, SEEDS] = [0, 1, 2, 3, 4, 5]; // of a point

  function add(parent, name, attributes = {}, text = null) {
    const inSvg = name === "svg" || parent.namespaceURI.endsWith("svg");
    const node = inSvg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(key, value);
    if (text !== null) node.textContent = text;
    parent.append(node);
    return node;
  }

  const colors = (look) => `--light:${look.color};--dark:${look.dark}`;

  function sample(parent, look) {
    const svg = add(parent, "svg", { width: 26, height: 12, "aria-hidden": "true" });
    const group = add(svg, "g", { class: "series", style: colors(look) });
    add(group, "path", { d: "M0,6H26", "stroke-dasharray": DASHES[look.dashes] });
    add(group, "path", { class: "marker", d: MARKERS[look.marker](3.2), transform: "translate(13,6)" });
  }

  function roundTicks(low, high, count) {
    const rough = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((x) => x * power).find((x) => x >= rough);
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step + 0); // never -0
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9) + (Math.abs(step / power - 2.5) < 1e-6 ? 1 : 0));
    return ticks.map((x) => [x, x.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })]);
  }

  class Panel {
    constructor(chart, panel, parent, hidden) {
      Object.assign(this, { chart, panel, hidden, picked: null, zoomed: panel.zoomed });
      this.box = add(parent, "div", { class: "panel" });
      if (panel.title) add(this.box, "h3", {}, panel.title);
      const name = `${chart.title}${panel.title ? ", " + panel.title : ""}: ${chart.y_label} against ${chart.x_label}`;
      this.svg = add(this.box, "svg", { class: "plot", role: "img", tabindex: 0, "aria-label": name + ". Arrow keys read the values." });
      this.tip = add(this.box, "div", { class: "tip", role: "status", hidden: "" });
      this.svg.addEventListener("pointermove", (event) => this.hover(event));
      this.svg.addEventListener("pointerdown", (event) => this.hover(event));
      this.svg.addEventListener("pointerleave", () => this.pick(null));
      this.svg.addEventListener("blur", () => this.pick(null));
      this.svg.addEventListener("keydown", (event) => this.key(event));
      new ResizeObserver(() => this.box.clientWidth !== this.width && this.draw()).observe(this.box);
    }

    get shown() {
      return this.panel.series.filter((series) => !this.hidden.has(series.look.label));
    }

    // Ranges of the axes: x from all curves, so that it stays; y from those that are shown.
    ranges() {
      const { chart, panel } = this;
      const xs = panel.series.flatMap((series) => series.points.map((point) => point[X]));
      if (panel.mark !== null) xs.push(panel.mark);
      let [left, right] = [Math.min(...xs), Math.max(...xs)];
      if (left === right) [left, right] = chart.log_x ? [left / 2, right * 2] : [left - 1, right + 1];
      if (chart.y_range) return [left, right, chart.y_range[0] - 0.03, chart.y_range[1] + 0.03];
      let points = this.shown.flatMap((series) => series.points);
      const settled = points.filter((point) => panel.settled === null || point[X] >= panel.settled);
      if (settled.length) points = settled;
      const ys = points.flatMap((point) => [point[Y], point[LOW], point[HIGH], ...point[SEEDS]].filter((y) => y !== null));
      if (!ys.length) return [left, right, 0, 1];
      const bottom = Math.min(...ys);
      const top = this.zoomed ? median(points.map((point) => point[Y])) : Math.max(...ys);
      const pad = 0.06 * (top - bottom) || 0.1;
      return [left, right, bottom - pad, top + pad];
    }

    draw() {
      const { chart, panel, svg } = this;
      this.width = this.box.clientWidth;
      const width = Math.max(this.width, 200);
      const height = Math.round(Math.min(Math.max(width * 0.62, 250), 420));
      const [left, right, bottom, top] = this.ranges();
      const yTicks = roundTicks(bottom, top, 7);
      const edge = { left: 30 + 7 * Math.max(...yTicks.map((tick) => tick[1].length)), right: 14, top: panel.mark === null ? 8 : 20, bottom: 46 };
      const scale = chart.log_x ? Math.log : (x) => x;
      const inset = 8;
      const span = width - edge.left - edge.right - 2 * inset;
      this.toX = (x) => edge.left + inset + (span * (scale(x) - scale(left))) / (scale(right) - scale(left));
      this.toY = (y) => height - edge.bottom - ((y - bottom) / (top - bottom)) * (height - edge.top - edge.bottom);
      svg.replaceChildren();
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.setAttribute("height", height);
      const floor = height - edge.bottom;

      for (const [y, label] of yTicks) {
        add(svg, "line", { class: "grid", x1: edge.left, x2: width - edge.right, y1: this.toY(y), y2: this.toY(y) });
        add(svg, "text", { x: edge.left - 7, y: this.toY(y) + 4, "text-anchor": "end" }, label);
      }
      let free = -Infinity; // tick labels must not run into each other
      for (const [x, label] of chart.ticks.length ? chart.ticks : roundTicks(left, right, width / 110)) {
        if (x < left * (1 - 1e-9) || x > right * (1 + 1e-9)) continue;
        const half = 3.6 * label.length;
        add(svg, "line", { class: "axis", x1: this.toX(x), x2: this.toX(x), y1: floor, y2: floor + 4 });
        if (this.toX(x) - half < free) continue;
        free = this.toX(x) + half + 6;
        add(svg, "text", { x: this.toX(x), y: floor + 17, "text-anchor": "middle" }, label);
      }
      add(svg, "line", { class: "axis", x1: edge.left, x2: width - edge.right, y1: floor, y2: floor });
      add(svg, "text", { x: (edge.left + width - edge.right) / 2, y: height - 8, "text-anchor": "middle" }, chart.x_label);
      const middle = (floor + edge.top) / 2;
      add(svg, "text", { transform: `translate(13,${middle}) rotate(-90)`, "text-anchor": "middle" }, chart.y_label);
      if (panel.mark !== null) {
        const x = this.toX(panel.mark);
        const anchor = x > width - 110 ? "end" : x < edge.left + 50 ? "start" : "middle";
        add(svg, "line", { class: "mark", x1: x, x2: x, y1: edge.top, y2: floor });
        add(svg, "text", { x: anchor === "end" ? x + 6 : anchor === "start" ? x - 6 : x, y: edge.top - 7, "text-anchor": anchor }, "training length");
      }

      const clip = `clip-${chart.name}-${chart.panels.indexOf(panel)}`;
      add(add(svg, "clipPath", { id: clip }), "rect", { x: edge.left, y: edge.top, width: width - edge.left - edge.right, height: floor - edge.top });
      const curves = add(svg, "g", { "clip-path": `url(#${clip})` });
      const black = (series) => series.look.color === "#000000"; // the method, on top
      for (const series of this.shown.sort((a, b) => black(a) - black(b))) this.curve(curves, series);
      this.guide = add(svg, "line", { class: "guide", y1: edge.top, y2: floor, visibility: "hidden" });
      this.pick(this.picked);
    }

    curve(parent, { look, points }) {
      const group = add(parent, "g", { class: "series", style: colors(look), "data-series": look.label });
      const path = points.map((point, i) => `${i ? "L" : "M"}${this.toX(point[X]).toFixed(1)},${this.toY(point[Y]).toFixed(1)}`);
      add(group, "path", { d: path.join(""), "stroke-dasharray": DASHES[look.dashes] });
      for (const point of points) {
        const [x, y] = [this.toX(point[X]), this.toY(point[Y])];
        if (point[LOW] !== null && point[HIGH] !== null) {
          add(group, "line", { x1: x, x2: x, y1: this.toY(point[LOW]), y2: this.toY(point[HIGH]) });
        }
        if (points.length <= MOST_MARKERS) {
          add(group, "path", { class: "marker", d: MARKERS[look.marker](3.4), transform: `translate(${x.toFixed(1)},${y.toFixed(1)})` });
        }
        for (const value of point[SEEDS]) add(group, "circle", { class: "seed", cx: x + 5, cy: this.toY(value), r: 1.6 });
      }
    }

    get places() {
      return [...new Set(this.shown.flatMap((series) => series.points.map((point) => point[X])))].sort((a, b) => a - b);
    }

    hover(event) {
      const x = event.clientX - this.svg.getBoundingClientRect().left;
      const gap = (place) => Math.abs(this.toX(place) - x);
      this.pick(this.places.reduce((best, place) => (best === null || gap(place) < gap(best) ? place : best), null));
    }

    key(event) {
      const places = this.places;
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") this.pick(null);
      if (!step || !places.length) return;
      event.preventDefault();
      const at = places.indexOf(this.picked);
      this.pick(places[at < 0 ? (step > 0 ? 0 : places.length - 1) : Math.min(Math.max(at + step, 0), places.length - 1)]);
    }

    // Show the values at x, highest first as in the chart; null for none.
    pick(x) {
      const found = this.shown
        .map((series) => [series.look, series.points.find((point) => point[X] === x)])
        .filter(([, point]) => point)
        .sort(([, a], [, b]) => b[Y] - a[Y]);
      this.picked = found.length ? x : null;
      this.tip.hidden = !found.length;
      this.guide.setAttribute("visibility", found.length ? "visible" : "hidden");
      if (!found.length) return;
      this.guide.setAttribute("x1", this.toX(x));
      this.guide.setAttribute("x2", this.toX(x));
      this.tip.replaceChildren();
      add(this.tip, "strong", {}, found[0][1][LABEL]);
      for (const [look, point] of found) {
        const line = add(this.tip, "div");
        sample(line, look);
        add(line, "span", {}, look.label);
        add(line, "span", {}, point[Y].toFixed(3) + spread(point));
      }
      const room = this.width - this.tip.offsetWidth;
      const left = this.toX(x) > this.width / 2 ? this.toX(x) - this.tip.offsetWidth - 12 : this.toX(x) + 12;
      this.tip.style.left = `${Math.max(0, Math.min(left, room))}px`;
    }
  }

  function median(values) {
    const sorted = [...values].sort((a, b) => a - b);
    const half = sorted.length >> 1;
    return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
  }

  function spread(point) {
    if (point[LOW] === null || point[HIGH] === null) return "";
    const [below, above] = [point[Y] - point[LOW], point[HIGH] - point[Y]];
    const even = Math.abs(below - above) < 1e-9;
    return even ? ` ± ${above.toFixed(3)}` : ` (${point[LOW].toFixed(2)}–${point[HIGH].toFixed(2)})`;
  }

  function drawChart(figure, chart) {
    const hidden = new Set();
    const place = figure.querySelector(".panels");
    place.replaceChildren();
    const panels = chart.panels.map((panel) => new Panel(chart, panel, place, hidden));
    const looks = new Map(chart.panels.flatMap((panel) => panel.series.map((series) => [series.look.label, series.look])));
    const legend = figure.querySelector(".legend");
    const buttons = [...looks.values()].map((look) => {
      const button = add(legend, "button", { type: "button", title: "Show or hide" });
      sample(button, look);
      add(button, "span", {}, look.label);
      button.addEventListener("click", () => {
        if (!hidden.delete(look.label)) hidden.add(look.label);
        update();
      });
      return [button, look.label];
    });
    const all = add(legend, "button", { type: "button", class: "all" });
    all.addEventListener("click", () => {
      if (hidden.size) hidden.clear();
      else for (const label of looks.keys()) hidden.add(label);
      update();
    });
    if (chart.zooms) {
      const zoom = add(legend, "button", { type: "button", class: "all zoom", "aria-pressed": "false", title: "End the axis at the median" }, "zoom in on the lower half");
      zoom.addEventListener("click", () => {
        const on = zoom.getAttribute("aria-pressed") !== "true";
        zoom.setAttribute("aria-pressed", String(on));
        for (const panel of panels) panel.zoomed = on;
        update();
      });
    }
    function update() {
      for (const [button, label] of buttons) button.setAttribute("aria-pressed", String(!hidden.has(label)));
      all.textContent = hidden.size ? "show all" : "hide all";
      for (const panel of panels) panel.draw();
    }
    update();
  }

  function makeSortable(table) {
    const headers = [...table.tHead.rows[0].cells];
    const body = table.tBodies[0];
    headers.forEach((header, column) => {
      header.querySelector("button").addEventListener("click", () => {
        const down = header.getAttribute("aria-sort") === "ascending";
        for (const other of headers) other.removeAttribute("aria-sort");
        header.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...body.rows].map((row) => [row, sortKey(row.cells[column])]);
        rows.sort(([, a], [, b]) => {
          if (a === null || b === null) return (a === null) - (b === null); // without a number: always last
          const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
          return down ? -order : order;
        });
        body.append(...rows.map(([row]) => row));
      });
    });
  }

  function sortKey(cell) {
    if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
    if (cell.tagName === "TD") return null;
    const text = cell.textContent;
    return text !== "" && isFinite(text) ? Number(text) : text;
  }

  const root = document.documentElement;
  const theme = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const showTheme = () => {
    theme.setAttribute("aria-pressed", String(isDark()));
  };
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    showTheme();
  });
  system.addEventListener("change", showTheme);
  showTheme();

  const charts = JSON.parse(document.getElementById("charts").textContent);
  for (const figure of document.querySelectorAll("figure.chart")) drawChart(figure, charts[figure.dataset.chart]);
  for (const table of document.querySelectorAll("table.sortable")) makeSortable(table);
})();
