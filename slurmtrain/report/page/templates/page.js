"use strict";
// Draws the figures with plotly, sorts tables, and refreshes a page that is served.
(() => {
  let view = null; // the steps that all charts show: [first, last]; null: all
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const colorOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // Colours of a figure are variables of the style sheet, which depend on the theme.
  const themed = (key, value) => (/color$/i.test(key) && String(value).startsWith("--") ? colorOf(value) : value);
  const template = () => { // what all figures have in common
    const clear = "rgba(0,0,0,0)", muted = colorOf("--muted"), strong = colorOf("--strong-edge");
    const axis = { gridcolor: colorOf("--edge"), linecolor: strong, zeroline: false, automargin: true };
    return { layout: {
      showlegend: false, margin: { l: 52, r: 14, t: 10, b: 34 }, paper_bgcolor: clear, plot_bgcolor: clear, font: { color: muted, size: 12 },
      hoverlabel: { bgcolor: colorOf("--bg"), bordercolor: strong, font: { color: colorOf("--text") }, namelength: -1 },
      modebar: { bgcolor: clear, color: muted, activecolor: colorOf("--accent") }, xaxis: axis, yaxis: axis,
    } };
  };
  const options = {
    responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  };

  const button = (text, label, act) => {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = text;
    made.setAttribute("aria-label", label);
    made.addEventListener("click", () => act(made));
    return made;
  };

  // All charts over the steps show those that a person has chosen in one of them.
  const show = (range, all) => {
    view = String(range) === all ? null : [...range];
    document.querySelectorAll("figure[data-steps] .js-plotly-plot").forEach((plot) => {
      if (String(plot.layout.xaxis.range) !== String(range)) Plotly.relayout(plot, { "xaxis.range": [...range] });
    });
  };

  const setUpScale = (figure, plot) => {
    const title = figure.querySelector("figcaption strong").textContent;
    const scale = button("Log scale", `Logarithmic scale: ${title}`, (made) => {
      const log = plot.layout.yaxis.type !== "log";
      made.setAttribute("aria-pressed", String(log));
      Plotly.relayout(plot, { "yaxis.type": log ? "log" : "linear", "yaxis.autorange": true });
    });
    scale.setAttribute("aria-pressed", String(plot.layout.yaxis.type === "log"));
    figure.querySelector("figcaption").append(scale);
  };

  // A list of the curves and their colours above a chart, which has room on a phone, too.
  const setUpLegend = (figure, data) => {
    const named = data.filter((each) => each.name && each.showlegend !== false);
    figure.querySelector(".legend").replaceChildren(...(named.length < 2 ? [] : named).map((each) => {
      const item = document.createElement("li"), key = document.createElement("span");
      key.className = "key";
      key.style.background = each.marker.color;
      // plotly reads a name as HTML, in which it is therefore escaped.
      item.append(key, new DOMParser().parseFromString(each.name, "text/html").body.textContent);
      return item;
    }));
  };

  const drawOne = (figure) => {
    near.unobserve(figure);
    const plot = figure.querySelector(".plot"), drawn = plot.classList.contains("js-plotly-plot");
    const { data, layout } = JSON.parse(figure.querySelector("script").textContent, themed);
    if (matchMedia("(pointer: coarse)").matches) layout.dragmode = false; // a finger scrolls the page
    const follows = figure.dataset.steps !== undefined, all = String(layout.xaxis.range);
    if (follows && view) layout.xaxis.range = [...view];
    layout.template = template();
    Plotly.react(plot, data, layout, options);
    setUpLegend(figure, data);
    if (drawn) return;
    if (follows) plot.on("plotly_relayout", () => show(plot.layout.xaxis.range, all));
    if (figure.dataset.scalable !== undefined) setUpScale(figure, plot);
  };

  // A page may have sixty charts: each is drawn when it comes near.
  const near = new IntersectionObserver((entries) => {
    entries.filter((each) => each.isIntersecting).forEach((each) => drawOne(each.target));
  }, { rootMargin: "800px" });

  const draw = () => {
    document.querySelectorAll("figure.chart").forEach((figure) => {
      const plot = figure.querySelector(".plot");
      plot.style.height = `${figure.dataset.height}px`; // now, so that nothing moves when it is drawn
      if (plot.classList.contains("js-plotly-plot")) drawOne(figure); else near.observe(figure);
    });
  };

  const setUpTable = (table) => {
    const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
    const value = (cell) => {
      const text = cell.textContent.trim(), parsed = Number(text.replaceAll(",", ""));
      return text === "" ? null : Number.isNaN(parsed) ? text : parsed;
    };
    heads.forEach((head, column) => {
      const act = button(head.textContent, head.textContent, () => {
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
    document.querySelectorAll("table.sortable").forEach(setUpTable);
    draw();
  };

  // Of a page that is served: ask for its content again, and put that in the place of the old one.
  const contentOf = (page) => page.querySelector("main")?.outerHTML + page.querySelector("h1")?.outerHTML;
  const live = (first) => {
    const meta = document.querySelector('meta[name="slurmtrain-refresh-s"]');
    if (!meta) return;
    const every = 1000 * Math.max(1, Number(meta.content)), said = document.getElementById("live");
    let shown = first; // the content as it was, without the time at which it was made
    const ask = async () => {
      try {
        const answer = await fetch(`${location.pathname}?content`, { cache: "no-store" });
        const next = new DOMParser().parseFromString(await answer.text(), "text/html");
        const content = contentOf(next);
        if (answer.status !== 200) said.textContent = `The server answered with ${answer.status}.`;
        else if (content !== shown) {
          shown = content;
          document.querySelectorAll(".js-plotly-plot").forEach((plot) => { Plotly.purge(plot); });
          for (const part of ["main", "h1"]) document.querySelector(part).replaceWith(document.adoptNode(next.querySelector(part)));
          const goesOn = next.querySelector('meta[name="slurmtrain-refresh-s"]') !== null;
          said.textContent = goesOn ? `Refreshed at ${new Date().toLocaleTimeString()}.` : "The run has ended, so this page no longer changes.";
          setUp();
          if (!goesOn) return;
        }
      } catch (error) {
        said.textContent = "The server does not answer, so the page is no longer updated.";
      }
      setTimeout(ask, every);
    };
    setTimeout(ask, every);
  };

  const first = contentOf(document); // before it is changed here
  setUp();
  live(first);
  dark.addEventListener("change", draw);
  addEventListener("beforeprint", () => { document.querySelectorAll("figure.chart").forEach(drawOne); });
})();
