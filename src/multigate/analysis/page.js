"use strict";
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const spoken = document.getElementById("spoken");
  const plots = [...document.querySelectorAll(".plot")];
  const night = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)");
  const PRINTED = 660;
  const LINE = 17;

  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : night.matches);
  const escaped = (words) =>
    words.replace(/[&<$]/g, (letter) => `&#${letter.charCodeAt(0)};`);

  function wrapped(words, letters) {
    const lines = [""];
    for (const word of words.split(" ")) {
      const last = lines[lines.length - 1];
      if (last && last.length + word.length >= letters) lines.push(word);
      else lines[lines.length - 1] = last ? `${last} ${word}` : word;
    }
    return lines.map(escaped);
  }

  // The names of the page's colours in a figure become colours.
  function coloured(json, colour) {
    return JSON.parse(json, (key, value) => {
      if (!/color$/.test(key) || typeof value !== "string") return value;
      return value.endsWith("-soft") ? `${colour(value.slice(0, -5))}40` : colour(value);
    });
  }

  function template(colour) {
    const axis = {
      gridcolor: colour("grid"),
      linecolor: colour("rule"),
      zeroline: false,
      ticks: "outside",
      ticklen: 4,
      tickcolor: colour("rule"),
      tickfont: { color: colour("quiet") },
      title: { standoff: 8, font: { size: 12.5 } },
    };
    return {
      layout: {
        paper_bgcolor: colour("card"),
        plot_bgcolor: colour("card"),
        font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("ink") },
        hoverlabel: {
          bgcolor: colour("card"),
          bordercolor: colour("quiet"),
          font: { color: colour("ink"), size: 12.5 },
          align: "left",
        },
        modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("quiet"), activecolor: colour("link") },
        xaxis: { ...axis, showgrid: false, showline: true },
        yaxis: { ...axis, exponentformat: "power", minexponent: 6 },
      },
    };
  }

  // Places of the panels in pixels: columns where there is room, else one below the other.
  function arranged(figure, width, colour) {
    const { panels, layout, keys } = figure;
    const bars = Object.keys(layout).filter((name) => name.startsWith("coloraxis"));
    const narrow = width < 650;
    const count = Math.min(figure.columns, narrow ? 1 : width < 900 ? 2 : 3);
    const rows = Math.ceil(panels.length / count);
    const heat = panels.some((panel) => panel.cells);
    const tall = heat ? 300 : narrow ? 230 : count === 1 ? 340 : 270;
    const beside = panels.map((panel) => wrapped(panel.y ?? "", (heat ? 210 : tall) / 7.5));
    const words = Math.max(...beside.map((lines) => lines.length));
    const left = 26 + 16 * words + 6.5 * Math.max(4, ...panels.map((panel) => panel.letters));
    const right = bars.length && !narrow ? 84 : 14;
    // A single map of few cells is not stretched over the whole page.
    const most = heat && panels.length === 1 ? Math.max(360, 64 * panels[0].cells) : Infinity;
    width = Math.min(width, left + right + most);
    const wide = (width - left - right - (count - 1) * (left + 10)) / count;
    const high = heat ? Math.min(tall, Math.max(210, 0.72 * wide)) : tall;
    const titles = panels.map((panel) => wrapped(panel.title ?? "", wide / 7));
    const over = 8 + LINE * Math.max(...titles.map((lines) => (lines[0] ? lines.length : 0)));
    const perRow = Math.max(1, Math.floor((width - 20) / (7 * Math.max(0, ...keys) + 52)));
    const legend = keys.length ? 14 + 20 * Math.ceil(keys.length / perRow) : 6;
    const below = panels.map((panel) => wrapped(panel.x ?? "", wide / 7));
    const under = 36 + 16 * Math.max(...below.map((lines) => lines.length));
    const bottom = under + (bars.length && narrow ? 64 * bars.length : 0);
    const inner = rows * high + (rows - 1) * (under + over);
    const margin = { l: left, r: right, t: legend + over, b: bottom };
    const height = margin.t + inner + bottom;
    const across = width - left - right;
    const annotations = [];
    const shapes = [];
    panels.forEach((panel, i) => {
      const id = i ? String(i + 1) : "";
      const x0 = (i % count) * (wide + left + 10);
      const y1 = inner - Math.floor(i / count) * (high + under + over);
      const xs = [x0 / across, (x0 + wide) / across];
      const ys = [Math.max(0, (y1 - high) / inner), y1 / inner];
      const title = (lines) => ({ text: lines.join("<br>") });
      Object.assign(layout[`xaxis${id}`], { domain: xs, anchor: `y${id}`, title: title(below[i]) });
      Object.assign(layout[`yaxis${id}`], { domain: ys, anchor: `x${id}`, title: title(beside[i]) });
      if (touch.matches) layout[`xaxis${id}`].fixedrange = layout[`yaxis${id}`].fixedrange = true;
      const note = { showarrow: false, xref: "paper", yref: "paper", font: { size: 13 } };
      annotations.push({
        ...note, text: titles[i].join("<br>"), align: "left",
        x: xs[0], xanchor: "left", y: ys[1], yanchor: "bottom", yshift: 3,
      });
      if (panel.empty) {
        shapes.push({
          type: "rect", xref: "paper", x0: xs[0], x1: xs[1], yref: "paper", y0: ys[0], y1: ys[1],
          line: { color: colour("grid"), width: 1 },
        });
        annotations.push({
          ...note, text: "nothing to show", font: { color: colour("quiet"), size: 13 },
          x: (xs[0] + xs[1]) / 2, xanchor: "center", y: (ys[0] + ys[1]) / 2, yanchor: "middle",
        });
      }
      for (const place of panel.endless ?? []) {
        annotations.push({
          ...note, text: "∞", hovertext: "infinite", font: { size: 18 },
          xref: `x${id}`, x: place, y: ys[1], yanchor: "top",
        });
      }
      for (const [place, text] of panel.missing ?? []) {
        annotations.push({
          ...note, text, textangle: -90, font: { color: colour("quiet"), size: 12 },
          xref: `x${id}`, x: place, y: ys[0], yanchor: "bottom",
        });
      }
    });
    bars.forEach((name, i) => {
      const bar = layout[name].colorbar;
      const share = 1 / bars.length;
      Object.assign(bar, { thickness: 12, outlinewidth: 0, tickfont: { color: colour("quiet") } });
      bar.title.side = narrow ? "bottom" : "right";
      Object.assign(bar, narrow
        ? { orientation: "h", xref: "paper", x: 0.5, lenmode: "fraction", len: 1,
            yref: "container", y: (8 + 64 * i) / height, yanchor: "bottom" }
        : { x: 1, xpad: 14, y: 1 - (i + 0.5) * share, ypad: 4, lenmode: "pixels",
            len: Math.min(340, inner * share * (bars.length > 1 ? 0.9 : 1)) });
    });
    return {
      template: template(colour), ...layout, width, height, margin, annotations, shapes,
      dragmode: touch.matches ? false : "zoom",
      hoverdistance: 20,
      legend: {
        orientation: "h", xref: "container", x: narrow ? 0 : left / width, xanchor: "left",
        yref: "container", y: 1, yanchor: "top", traceorder: "normal",
      },
    };
  }

  function draw(plot) {
    const styles = getComputedStyle(root);
    const colour = (name) => styles.getPropertyValue(`--${name}`).trim() || name;
    const figure = coloured(plot.parentElement.querySelector("script").textContent, colour);
    const layout = arranged(figure, width(plot), colour);
    waiting.delete(plot);
    plot.style.minHeight = "";
    const config = {
      displaylogo: false,
      displayModeBar: touch.matches ? false : "hover",
      modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
      toImageButtonOptions: { filename: plot.dataset.name, scale: 2 },
    };
    // Plotly keeps the room of a colour bar that has moved: a new arrangement starts from nothing.
    if (plot.data && plot.dataset.width !== String(width(plot))) Plotly.purge(plot);
    plot.dataset.width = width(plot);
    Plotly.react(plot, figure.data, layout, config);
  }

  const width = (plot) => (printing ? PRINTED : Math.floor(plot.clientWidth));
  const waiting = new Set();
  let printing = false;
  let timer = 0;
  let saying = 0;

  // What is in view first, then the rest, one at a time, so that the page stays usable.
  function next() {
    const seen = (plot) => {
      const box = plot.getBoundingClientRect();
      return box.bottom > -200 && box.top < innerHeight + 200;
    };
    const list = [...waiting];
    if (!list.length) {
      root.dataset.ready = "true";
      return;
    }
    timer = setTimeout(next, 4);  // before drawing, lest one bad figure keeps the others back
    draw(list.find(seen) ?? list[0]);
  }

  function redraw() {
    plots.forEach((plot) => waiting.add(plot));
    root.dataset.ready = "false";
    button.textContent = dark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${dark() ? "light" : "dark"} colours`);
    clearTimeout(timer);
    timer = setTimeout(next, 0);
  }

  // The places that hovering can show, panel by panel, in the numbers that plotly computes with.
  function places(plot) {
    const found = plot.data.flatMap(({ type, hoverinfo, x, y, z, xaxis: axis }) => {
      if (hoverinfo === "skip") return [];
      if (type === "heatmap") {
        return z.flatMap((row, yval) =>
          row.flatMap((value, xval) => (value === null ? [] : [{ axis, xval, yval }])));
      }
      return x.flatMap((xval, i) => (y[i] === null ? [] : [{ axis, xval, yval: y[i] }]));
    });
    if (plot.layout.hovermode === "closest") return found;
    const columns = new Map(found.map((place) => [`${place.axis} ${place.xval}`, place]));
    return [...columns.values()].sort((a, b) =>
      a.axis.localeCompare(b.axis, "en", { numeric: true }) || a.xval - b.xval);
  }

  function read(plot, step) {
    const list = places(plot);
    if (!list.length) return;
    const at = Number(plot.dataset.at ?? (step > 0 ? -1 : list.length)) + step;
    plot.dataset.at = Math.min(list.length - 1, Math.max(0, at));
    const { axis, xval, yval } = list[plot.dataset.at];
    Plotly.Fx.hover(plot, { xval, yval }, axis + axis.replace("x", "y"));
    clearTimeout(saying);
    saying = setTimeout(() => say(plot), 150);  // plotly shows it a little later
  }

  // What the arrow keys have brought up is said aloud, in the words that are shown.
  function say(plot) {
    const lines = (text) => [...text.querySelectorAll(".line")].map((line) => line.textContent);
    spoken.textContent = [...plot.querySelectorAll(".hoverlayer text")]
      .map((text) => lines(text).join(", ") || text.textContent)
      .filter(Boolean).join("; ");
  }

  for (const plot of plots) {
    plot.addEventListener("keydown", (event) => {
      if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
        event.preventDefault();
        if (plot.data) read(plot, event.key === "ArrowRight" ? 1 : -1);
      }
    });
    plot.addEventListener("blur", () => {
      if (plot.data) Plotly.Fx.unhover(plot);
      delete plot.dataset.at;
    });
  }

  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try {
      localStorage.setItem("multigate-theme", root.dataset.theme);
    } catch { /* pages opened from a file may have no storage */ }
    redraw();
  });
  night.addEventListener("change", redraw);

  let before = root.clientWidth;
  let settled = 0;
  addEventListener("resize", () => {
    clearTimeout(settled);
    settled = setTimeout(() => {
      if (root.clientWidth === before || printing) return;
      before = root.clientWidth;
      redraw();
    }, 120);
  });

  let theme;
  addEventListener("beforeprint", () => {
    theme = root.dataset.theme;
    printing = true;
    root.dataset.theme = "light";
    clearTimeout(timer);
    plots.forEach(draw);
  });
  addEventListener("afterprint", () => {
    printing = false;
    if (theme) root.dataset.theme = theme;
    else delete root.dataset.theme;
    redraw();
  });

  redraw();
})();
