"use strict";
// Reading and zooming of charts, sorting of tables, and the refresh of a page that is served. The page is complete without it.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const WIDTH = 1000;
  let view = null; // the steps that all charts show: [first, last]; null: all
  let charts = [];
  const logs = new Map(); // key of a chart -> whether a person wants a logarithmic axis

  const number = (value) => {
    if (value === null || value === undefined) return "no value";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e15)) return value.toExponential(3);
    return value.toLocaleString("en-US", { maximumSignificantDigits: size >= 1e5 ? 15 : 5, maximumFractionDigits: size >= 1e5 ? 0 : 20 });
  };
  const short = (value) => {
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size < 1e-4 || size >= 1e15) return value.toExponential(0);
    for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (size >= unit * (letter === "k" ? 10 : 1)) return `${Number((value / unit).toPrecision(4))}${letter}`;
    }
    return `${Number(value.toPrecision(5))}`;
  };
  const element = (name, attributes, text) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const button = (text, label, act) => {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = text;
    made.setAttribute("aria-label", label);
    made.addEventListener("click", act);
    return made;
  };
  const roundStep = (least) => {
    const power = 10 ** Math.floor(Math.log10(least));
    return power * [1, 2, 5, 10].find((factor) => power * factor >= least * (1 - 1e-9));
  };
  const ticks = (low, high, log) => {
    const found = [];
    if (log) {
      const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
      const whole = last - first >= 2;
      for (let power = first - 1; power <= last; power += 1) {
        for (const factor of whole ? [1] : [1, 2, 5]) {
          const value = factor * 10 ** power;
          if (value >= low && value <= high) found.push(value);
        }
      }
      return whole ? found.filter((_, index) => index % Math.ceil(found.length / 5) === 0) : found;
    }
    const step = roundStep((high - low) / 5);
    for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9 && found.length < 20; index += 1) {
      found.push(Number((index * step).toPrecision(12)));
    }
    return found;
  };
  const nearest = (steps, step) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle; else high = middle;
    }
    return Math.abs(steps[low] - step) <= Math.abs(steps[high] - step) ? low : high;
  };

  class Chart {
    constructor(figure) {
      this.figure = figure;
      this.key = figure.id;
      this.data = JSON.parse(figure.querySelector('script[type="application/json"]').textContent);
      this.plot = figure.querySelector(".plot");
      this.readout = figure.querySelector(".readout");
      this.height = Number(figure.querySelector(".paths").getAttribute("height"));
      this.paths = [...figure.querySelectorAll(".paths path")];
      this.log = logs.has(this.key) ? logs.get(this.key) : this.data.log;
      this.cursor = element("line", { class: "cursor", y1: 0, y2: this.height, visibility: "hidden" });
      this.brush = element("rect", { class: "brush", y: 0, height: this.height, visibility: "hidden" });
      figure.querySelector(".marks").append(this.brush, this.cursor);
      const positive = this.data.series.every((each) => each.v.every((value) => value === null || value > 0));
      const tools = document.createElement("div");
      tools.className = "tools";
      tools.append(
        button("+", `Zoom in: ${this.title()}`, () => zoom(0.5)),
        button("\u2212", `Zoom out: ${this.title()}`, () => zoom(2)),
        button("All steps", `Show all steps: ${this.title()}`, () => show(null)),
      );
      if (positive && !this.data.stacked) {
        this.scale = button("Log scale", `Logarithmic scale: ${this.title()}`, () => {
          this.log = !this.log;
          logs.set(this.key, this.log);
          this.draw();
        });
        tools.append(this.scale);
      }
      figure.querySelector("figcaption").append(tools);
      this.plot.tabIndex = 0;
      this.plot.setAttribute("role", "slider");
      this.plot.setAttribute("aria-orientation", "horizontal");
      this.plot.addEventListener("keydown", (event) => this.onKey(event));
      this.plot.addEventListener("focus", () => read(this.at === undefined ? this.range()[1] : this.at, this));
      this.plot.addEventListener("pointermove", (event) => this.onMove(event));
      this.plot.addEventListener("pointerleave", () => { if (this.from === undefined) read(null, this); });
      this.plot.addEventListener("pointerdown", (event) => this.onDown(event));
      this.plot.addEventListener("pointerup", (event) => this.onUp(event));
      this.plot.addEventListener("pointercancel", () => this.endBrush());
      this.plot.addEventListener("dblclick", () => show(null));
      this.announce(this.range()[1]);
      if (view || this.log !== this.data.log) this.draw();
      else if (this.scale) this.scale.setAttribute("aria-pressed", String(this.log));
    }
    title() { return this.figure.querySelector("figcaption strong").textContent; }
    range() { return view || this.data.x; }
    place(step) { const [low, high] = this.range(); return (step - low) / (high - low || 1); }
    stepAt(event) {
      const box = this.plot.getBoundingClientRect(), [low, high] = this.range();
      return low + (high - low) * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    }
    visible() {
      const [low, high] = this.range();
      return this.data.series.map((each) => {
        let begin = each.s.findIndex((step) => step >= low), end = each.s.length;
        if (begin < 0) begin = each.s.length;
        begin = Math.max(0, begin - 1);
        while (end > begin && each.s[end - 1] > high) end -= 1;
        end = Math.min(each.s.length, end + 1);
        return { s: each.s.slice(begin, end), v: each.v.slice(begin, end) };
      });
    }
    draw() {
      const parts = this.visible(), stacked = Boolean(this.data.stacked);
      if (stacked) {
        const sums = parts.length ? parts[0].s.map(() => 0) : [];
        for (const part of parts) {
          part.below = sums.slice();
          part.v = part.v.map((value, index) => (sums[index] += Math.max(0, value)));
        }
      }
      const values = parts.flatMap((part) => part.v.filter((value) => value !== null));
      let low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
      if (!values.length) { low = 0; high = 1; }
      if (stacked) { low = 0; high = high * 1.05 || 1; }
      else if (this.log) { low /= 1.1; high *= 1.1; }
      else {
        const room = 0.05 * (high - low) || 0.05 * Math.abs(high) || 0.5;
        low = low >= 0 && low - room < 0 ? 0 : low - room;
        high += room;
      }
      const y = (value) => {
        const share = this.log ? (Math.log10(value) - Math.log10(low)) / (Math.log10(high) - Math.log10(low)) : (value - low) / (high - low);
        return (this.height * (1 - share)).toFixed(1);
      };
      const point = (step, value) => `${(WIDTH * this.place(step)).toFixed(1)} ${y(value)}`;
      parts.forEach((part, index) => {
        let words = "", pen = "M";
        part.s.forEach((step, i) => {
          if (part.v[i] === null) { pen = "M"; return; }
          words += `${pen}${point(step, part.v[i])}`;
          pen = "L";
        });
        if (stacked && part.s.length) {
          for (let i = part.s.length - 1; i >= 0; i -= 1) words += `L${point(part.s[i], part.below[i])}`;
          words += "Z";
        }
        if (this.paths[index]) this.paths[index].setAttribute("d", words);
      });
      const yaxis = this.figure.querySelector(".yaxis"), xaxis = this.figure.querySelector(".xaxis");
      yaxis.replaceChildren(...ticks(low, high, this.log).flatMap((value) => [
        element("line", { class: "rule", x1: 0, x2: "100%", y1: y(value), y2: y(value) }),
        element("text", { class: "yt", x: -6, y: y(value) }, short(value)),
      ]));
      const marks = ticks(...this.range(), false).filter(Number.isInteger);
      xaxis.replaceChildren(...marks.map((step, index) =>
        element("text", { class: index % 2 ? "xt minor" : "xt", x: `${100 * this.place(step)}%`, y: this.height + 16 }, short(step))));
      const dots = [...this.figure.querySelectorAll(".marks g")];
      const scaled = view || this.log !== this.data.log;
      dots.forEach((group, index) => {
        if (!scaled || !group.childElementCount) { group.removeAttribute("visibility"); if (!scaled) return; }
        const part = parts[index];
        if (!group.childElementCount || !part) return;
        const [first, last] = this.range();
        group.replaceChildren(...part.s.flatMap((step, i) => (step < first || step > last || part.v[i] === null ? [] :
          [element("circle", { cx: `${100 * this.place(step)}%`, cy: y(part.v[i]), r: 3 })])));
      });
      if (!scaled && this.original) dots.forEach((group, index) => group.replaceChildren(...this.original[index].map((each) => each.cloneNode(true))));
      this.figure.querySelector(".xlabel").textContent = this.log ? "step \u00b7 logarithmic scale" : "step";
      if (this.scale) this.scale.setAttribute("aria-pressed", String(this.log));
    }
    words(step) {
      const parts = this.data.series.filter((each) => each.s.length).map((each) => {
        const index = nearest(each.s, step), unit = each.unit && this.data.series.length === 1 ? ` ${each.unit}` : "";
        return { at: each.s[index], text: `${each.name} ${number(each.v[index])}${unit}` };
      });
      if (!parts.length) return "";
      const at = parts[0].at;
      return `step ${at.toLocaleString("en-US")}: ${parts.map((part) => part.text + (part.at === at ? "" : ` (step ${part.at.toLocaleString("en-US")})`)).join("; ")}`;
    }
    announce(step) {
      const [low, high] = this.range();
      this.plot.setAttribute("aria-valuemin", Math.floor(low));
      this.plot.setAttribute("aria-valuemax", Math.ceil(high));
      this.plot.setAttribute("aria-valuenow", Math.round(Math.min(high, Math.max(low, step))));
      this.plot.setAttribute("aria-valuetext", this.words(step) || "no value");
    }
    mark(step) {
      const [low, high] = this.range();
      const seen = step !== null && step >= low && step <= high;
      this.cursor.setAttribute("visibility", seen ? "visible" : "hidden");
      if (seen) {
        const x = `${100 * this.place(step)}%`;
        this.cursor.setAttribute("x1", x);
        this.cursor.setAttribute("x2", x);
      }
      this.readout.textContent = seen ? this.words(step) : "";
    }
    move(by) {
      const steps = this.data.series[0].s, [low, high] = this.range();
      const here = nearest(steps, this.at === undefined || this.at === null ? high : this.at);
      const step = steps[Math.min(steps.length - 1, Math.max(0, here + by))];
      if (step >= low && step <= high) read(step, this);
      this.announce(step);
    }
    onKey(event) {
      const jump = Math.max(1, Math.round(this.data.series[0].s.length / 20));
      const acts = {
        ArrowLeft: () => this.move(-1), ArrowDown: () => this.move(-1), ArrowRight: () => this.move(1), ArrowUp: () => this.move(1),
        PageUp: () => this.move(jump), PageDown: () => this.move(-jump),
        Home: () => this.move(-this.data.series[0].s.length), End: () => this.move(this.data.series[0].s.length),
        "+": () => zoom(0.5, this.at), "=": () => zoom(0.5, this.at), "-": () => zoom(2, this.at), 0: () => show(null),
        Escape: () => show(null),
      };
      if (!acts[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      acts[event.key]();
      this.announce(this.at === undefined || this.at === null ? this.range()[1] : this.at);
      event.preventDefault();
    }
    onMove(event) {
      const step = this.stepAt(event);
      if (this.from !== undefined) {
        const [a, b] = [this.place(this.from), this.place(step)].sort((x, y) => x - y);
        this.brush.setAttribute("visibility", "visible");
        this.brush.setAttribute("x", `${100 * a}%`);
        this.brush.setAttribute("width", `${100 * (b - a)}%`);
      }
      read(step, this);
    }
    onDown(event) {
      if (event.pointerType !== "mouse") { read(this.stepAt(event), this); return; }
      if (event.button !== 0) return;
      this.from = this.stepAt(event);
      this.plot.setPointerCapture(event.pointerId);
    }
    onUp(event) {
      if (this.from === undefined) return;
      const from = this.from, to = this.stepAt(event);
      this.endBrush();
      if (Math.abs(this.place(to) - this.place(from)) > 0.02) show([Math.min(from, to), Math.max(from, to)]);
    }
    endBrush() {
      this.from = undefined;
      this.brush.setAttribute("visibility", "hidden");
    }
  }

  const read = (step, by) => {
    for (const chart of charts) {
      chart.at = step;
      if (chart === by || by.figure.closest("section") === chart.figure.closest("section") || step === null) chart.mark(step);
    }
  };
  const show = (next) => {
    view = next;
    for (const chart of charts) { chart.draw(); chart.announce(chart.range()[1]); }
  };
  const zoom = (factor, around) => {
    if (!charts.length) return;
    const [low, high] = charts[0].data.x, [a, b] = view || [low, high];
    const middle = around === undefined || around === null ? (a + b) / 2 : around;
    const size = Math.max((b - a) * factor, Math.min(high - low, 4));
    if (size >= high - low) return show(null);
    const begin = Math.min(Math.max(low, middle - size / 2), high - size);
    show([begin, begin + size]);
  };

  const setUpParallel = (figure) => {
    const threads = [...figure.querySelectorAll("[data-thread]")], readout = figure.querySelector(".readout");
    const plot = figure.querySelector(".scroll");
    let chosen = -1;
    const choose = (index) => {
      chosen = index;
      threads.forEach((thread, number) => {
        thread.classList.toggle("chosen", number === index);
        thread.classList.toggle("faint", index >= 0 && number !== index);
      });
      readout.textContent = index >= 0 ? threads[index].querySelector("title").textContent : "";
    };
    threads.forEach((thread, index) => thread.addEventListener("pointerenter", () => choose(index)));
    figure.addEventListener("pointerleave", () => choose(-1));
    readout.removeAttribute("aria-hidden");
    readout.setAttribute("aria-live", "polite");
    plot.addEventListener("keydown", (event) => {
      const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (by === undefined) { if (event.key === "Escape") choose(-1); return; }
      choose((chosen + by + threads.length) % threads.length);
      event.preventDefault();
    });
  };

  const setUpTable = (table) => {
    const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
    const value = (cell) => {
      const text = cell.textContent.trim(), parsed = Number(text.replaceAll(",", ""));
      return text === "" ? null : Number.isNaN(parsed) ? text : parsed;
    };
    heads.forEach((head, column) => {
      const name = head.textContent, act = document.createElement("button");
      act.type = "button";
      act.textContent = name;
      act.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((each) => each.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...body.rows].map((row) => [value(row.cells[column]), row]);
        rows.sort(([a], [b]) => {
          if (a === null || b === null) return (a === null) - (b === null);
          const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
          return down ? -order : order;
        });
        body.append(...rows.map(([, row]) => row));
      });
      head.replaceChildren(act);
    });
  };

  const setUp = () => {
    charts = [...document.querySelectorAll('figure[data-kind="lines"], figure[data-kind="stack"]')].map((figure) => {
      const chart = new Chart(figure);
      chart.original = [...figure.querySelectorAll(".marks g")].map((group) => [...group.children].map((each) => each.cloneNode(true)));
      return chart;
    });
    document.querySelectorAll('figure[data-kind="parallel"]').forEach(setUpParallel);
    document.querySelectorAll("table.sortable").forEach(setUpTable);
  };

  // Of a page that is served: ask for it again, and put its content in the place of the old one, as far as a person has unfolded it.
  const live = () => {
    const meta = document.querySelector('meta[name="slurmtrain-refresh-s"]');
    if (!meta) return;
    const every = 1000 * Math.max(1, Number(meta.content)), said = document.getElementById("live");
    const path = (node) => [...document.querySelectorAll("details")].indexOf(node);
    let tag = null;
    const ask = async () => {
      try {
        const answer = await fetch(location.href.split("#")[0], { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
        if (answer.status === 200) {
          tag = answer.headers.get("ETag");
          const next = new DOMParser().parseFromString(await answer.text(), "text/html");
          const open = [...document.querySelectorAll("details[open]")].map(path), focus = document.activeElement;
          const held = focus && focus.closest("figure") ? focus.closest("figure").id : null;
          document.querySelector("main").replaceWith(document.adoptNode(next.querySelector("main")));
          document.querySelector("header .wide").querySelector("h1").replaceWith(document.adoptNode(next.querySelector("h1")));
          const all = document.querySelectorAll("details");
          open.forEach((index) => { if (all[index]) all[index].open = true; });
          setUp();
          const again = held && document.getElementById(held);
          if (again) again.querySelector(".plot").focus({ preventScroll: true });
          said.textContent = `Refreshed at ${new Date().toLocaleTimeString()}.`;
          if (!next.querySelector('meta[name="slurmtrain-refresh-s"]')) { said.textContent = "The run has ended, so this page no longer changes."; return; }
        } else if (answer.status !== 304) said.textContent = `The server answered with ${answer.status}.`;
      } catch (error) {
        said.textContent = "The server does not answer, so the page is no longer updated.";
      }
      setTimeout(ask, every);
    };
    setTimeout(ask, every);
  };

  setUp();
  live();
})();
