"use strict";
(async () => {
  const MERGED = 24; // if more curves are shown, those of one style are one trace, without bands
  const BINS = 20;
  const DASHES = ["solid", "dash", "dot"];

  const controls = document.querySelector(".controls");
  const boxes = [...controls.querySelectorAll("[name=curve]")];
  const metricBoxes = [...controls.querySelectorAll("[name=metric]")];
  const narrow = matchMedia("(max-width: 44rem)");
  const touch = matchMedia("(pointer: coarse)");

  async function unpack(base64) {
    const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).json();
  }

  if (!("DecompressionStream" in window)) {
    document.querySelector(".charts").textContent = "The charts need a browser of 2023 or later.";
    return;
  }
  const { axes, divisors, charts, columns, curves, personal, rankings, clients } = await unpack(
    document.getElementById("data").textContent,
  );
  const isMany = boxes.length > 0 && document.getElementById("filter") !== null;

  // Plotly interprets tags in text, but labels are plain text.
  const escapeTags = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
  const names = curves.map((curve) => escapeTags(curve.label));

  // The mean over a window of up to `width` values on each side.
  function smooth(values, width) {
    if (width === 0) return values;
    return values.map((_, i) => {
      const reach = Math.min(width, i, values.length - 1 - i); // the ends stay what they are
      const window = values.slice(i - reach, i + reach + 1);
      return window.reduce((sum, value) => sum + value, 0) / window.length;
    });
  }

  // The points of one run; of several evaluations at one x the last one counts.
  function points(run, axis, metric) {
    const allX = columns[run.columns[axis]];
    const allY = columns[run.columns[metric]];
    const x = [];
    const y = [];
    if (!allX || !allY) return { x, y };
    allX.forEach((value, i) => {
      if (value === null || allY[i] === null) return;
      const place = value / divisors[axis];
      if (place === x.at(-1)) {
        y[y.length - 1] = allY[i];
      } else {
        x.push(place);
        y.push(allY[i]);
      }
    });
    return { x, y };
  }

  // The values of a polygon at increasing places, all within its range.
  function interpolate(places, { x, y }) {
    let i = 0;
    return places.map((place) => {
      while (i < x.length - 2 && x[i + 1] < place) i += 1;
      if (x.length === 1 || place <= x[i]) return y[i];
      const share = Math.min(1, (place - x[i]) / (x[i + 1] - x[i]));
      return y[i] + share * (y[i + 1] - y[i]);
    });
  }

  // Mean, smallest and largest value over the seeds, where all of them have been.
  function average(runs, axis, metric) {
    const series = runs.map((run) => points(run, axis, metric)).filter(({ x }) => x.length > 0);
    if (series.length === 0) return { x: [], mean: [] };
    if (series.length === 1) return { x: series[0].x, mean: series[0].y };
    const start = Math.max(...series.map(({ x }) => x[0]));
    const end = Math.min(...series.map(({ x }) => x.at(-1)));
    const places = [...new Set(series.flatMap(({ x }) => x))];
    const x = places.filter((place) => place >= start && place <= end).sort((a, b) => a - b);
    const values = series.map((of_seed) => interpolate(x, of_seed));
    const over = (reduce) => x.map((_, i) => reduce(values.map((of_seed) => of_seed[i])));
    return {
      x,
      mean: over((seeds) => seeds.reduce((sum, value) => sum + value, 0) / seeds.length),
      low: over((seeds) => Math.min(...seeds)),
      high: over((seeds) => Math.max(...seeds)),
    };
  }

  const averages = new Map();
  function averageOf(index, axis, metric) {
    const key = `${index} ${axis} ${metric}`;
    if (!averages.has(key)) averages.set(key, average(curves[index].runs, axis, metric));
    return averages.get(key);
  }

  // The traces of one curve: its mean, and a band or the single seeds.
  function traces(index, axis, metric, colour, { width, seeds }) {
    const { x, mean, low, high } = averageOf(index, axis, metric);
    if (x.length === 0) return [];
    const visible = boxes[index].checked;
    const line = { color: colour, width: 2, dash: curves[index].dash };
    const main = {
      x,
      y: smooth(mean, width),
      name: names[index],
      mode: x.length > 1 ? "lines" : "markers",
      line,
      marker: { color: colour },
      meta: index,
      legendrank: index,
      visible: visible || "legendonly",
      hovertemplate: "%{y:.4~g}",
    };
    if (!low) return [main];
    if (seeds) {
      const single = curves[index].runs.map((run) => {
        const { x, y } = points(run, axis, metric);
        const hovertemplate = `%{y:.4~g} (seed ${run.seed})`;
        const thin = { line: { ...line, width: 1 }, opacity: 0.6, showlegend: false };
        return { ...main, ...thin, visible, x, y: smooth(y, width), hovertemplate };
      });
      return [...single, main];
    }
    const smoothLow = smooth(low, width);
    const smoothHigh = smooth(high, width);
    const quiet = { mode: "lines", line: { width: 0 }, showlegend: false, hoverinfo: "skip" };
    const band = { fill: "tonexty", fillcolor: `${colour}28` };
    main.customdata = smoothLow.map((value, i) => [value, smoothHigh[i]]);
    main.hovertemplate += " (%{customdata[0]:.4~g} to %{customdata[1]:.4~g})";
    return [
      { ...quiet, visible, x, y: smoothLow },
      { ...quiet, visible, x, y: smoothHigh, ...band },
      main,
    ];
  }

  // Several curves as one trace with gaps: hundreds of traces would be slow.
  function merged(indices, axis, metric, line, { width }) {
    const trace = { x: [], y: [], text: [], mode: "lines", line, showlegend: false };
    for (const index of indices) {
      const { x, mean } = averageOf(index, axis, metric);
      const y = smooth(mean, width);
      for (let i = 0; i < x.length; i += 1) {
        trace.x.push(x[i]);
        trace.y.push(y[i]);
        trace.text.push(names[index]);
      }
      trace.x.push(null);
      trace.y.push(null);
      trace.text.push("");
    }
    return { ...trace, visible: true, hovertemplate: "%{text} %{y:.4~g}<extra></extra>" };
  }

  // What one chart shows: few curves with their bands, many merged, and the others in grey.
  function chartTraces(axis, metric, style, options) {
    const colourOf = ({ colour }) => style.getPropertyValue(`--curve-${colour}`);
    const indices = [...curves.keys()];
    const shown = indices.filter((index) => boxes[index].checked);
    const data = [];
    if (isMany && options.others) {
      const line = { color: style.getPropertyValue("--others"), width: 1 };
      const others = indices.filter((index) => !boxes[index].checked);
      data.push(merged(others, axis, metric, line, options));
    }
    if (shown.length > MERGED) {
      const styles = new Map();
      for (const index of shown) {
        const key = `${curves[index].colour} ${curves[index].dash}`;
        styles.set(key, [...(styles.get(key) ?? []), index]);
      }
      for (const same of styles.values()) {
        const line = { color: colourOf(curves[same[0]]), width: 1.5, dash: curves[same[0]].dash };
        data.push(merged(same, axis, metric, line, options));
      }
      return data;
    }
    for (const index of isMany ? shown : indices) {
      data.push(...traces(index, axis, metric, colourOf(curves[index]), options));
    }
    return data;
  }

  // Two charts per metric of single clients: over rounds, and over the clients at the end.
  function personalTraces(chart, style, view) {
    const rounds = [];
    const atEnd = [];
    const all = Object.values(chart.values).flat();
    const low = all.reduce((least, value) => Math.min(least, value), Infinity);
    const high = all.reduce((most, value) => Math.max(most, value), -Infinity);
    for (const [key, values] of Object.entries(chart.values)) {
      const index = Number(key);
      if (!boxes[index].checked) continue;
      const color = style.getPropertyValue(`--curve-${curves[index].colour}`);
      const base = { visible: true, legendgroup: names[index], name: names[index], mode: "lines" };
      Object.entries(chart.lines).forEach(([title, metric], place) => {
        const { x, mean } = averageOf(index, "round", metric);
        const line = { color, width: 2, dash: DASHES[place] };
        const hovertemplate = `%{y:.4~g} (${title.toLowerCase()})`;
        const mode = x.length > 1 ? "lines" : "markers";
        rounds.push({ ...base, x, y: mean, mode, line, hovertemplate, showlegend: false });
      });
      const drawn = view === "histogram" ? histogram(values, low, high) : ordered(values);
      const line = { color, width: 2, shape: drawn.shape };
      atEnd.push({ ...base, ...drawn, line, hovertemplate: "%{y:.4~g}", showlegend: true });
    }
    return { rounds, atEnd };
  }

  function ordered(values) {
    const x = values.map((_, i) => (100 * (i + 1)) / values.length);
    return { x, y: values, shape: "vh" };
  }

  function histogram(values, low, high) {
    const width = (high - low || 1) / BINS;
    const y = new Array(BINS).fill(0);
    for (const value of values) {
      y[Math.min(BINS - 1, Math.floor((value - low) / width))] += 100 / values.length;
    }
    return { x: y.map((_, i) => low + (i + 0.5) * width), y, shape: "hvh" };
  }

  // The range of the numbers that are shown, with a margin.
  function range(data, logarithmic) {
    let low = Infinity;
    let high = -Infinity;
    for (const trace of data) {
      if (trace.visible !== true) continue;
      for (const value of trace.y) {
        if (value === null || (logarithmic && value <= 0)) continue;
        const place = logarithmic ? Math.log10(value) : value;
        low = Math.min(low, place);
        high = Math.max(high, place);
      }
    }
    if (low > high) return undefined;
    const margin = 0.04 * (high - low || Math.abs(high) || 1);
    return [low - margin, high + margin];
  }

  const chosen = (name) => document.querySelector(`[name=${name}]:checked`)?.value;

  function plot(id, data, layout) {
    const saveAsSvg = {
      name: "Save as SVG",
      icon: Plotly.Icons.disk,
      click: (chart) => Plotly.downloadImage(chart, { format: "svg", filename: id }),
    };
    Plotly.react(id, data, layout, {
      responsive: true,
      displaylogo: false,
      displayModeBar: touch.matches ? false : "hover",
      modeBarButtons: [["toImage", saveAsSvg, "zoom2d", "pan2d", "resetScale2d"]],
    });
  }

  // Functions that draw one chart each, by the id of its element.
  function drawings() {
    const axis = chosen("axis");
    const scale = chosen("scale");
    const options = {
      width: Number(controls.querySelector("[name=smoothing]").value),
      seeds: controls.querySelector("[name=seeds]")?.checked,
      others: controls.querySelector("[name=others]")?.checked,
    };
    const style = getComputedStyle(document.documentElement);
    const [text, muted, border, background] = ["text", "muted", "border", "background"].map(
      (name) => style.getPropertyValue(`--${name}`),
    );
    const count = boxes.filter((box) => box.checked).length;
    const axisOf = (title) => ({
      title: { text: title, font: { size: 13 }, standoff: 10 },
      color: muted,
      gridcolor: border,
      linecolor: border,
      zeroline: false,
      automargin: true,
    });
    const common = {
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: text },
      paper_bgcolor: background,
      plot_bgcolor: background,
      margin: { l: 56, r: 12, t: 28, b: 48 },
      hovermode: narrow.matches || isMany ? "closest" : "x unified",
      hoverlabel: { bgcolor: background, bordercolor: border, font: { color: text } },
      dragmode: touch.matches ? false : "zoom", // a finger on a chart scrolls the page
    };
    const below = { orientation: "h", y: -0.25, yanchor: "top" };
    const found = new Map();
    const shown = metricBoxes.filter((box) => box.checked).map((box) => box.value);
    shown.forEach((metric, position) => {
      const chart = charts[metric];
      const isLogarithmic = scale === "automatic" ? chart.log : scale === "logarithmic";
      const logarithmic = isLogarithmic && { type: "log", nticks: 4, exponentformat: "power" };
      found.set(metric, () => {
        const data = chartTraces(axis, metric, style, options);
        plot(metric, data, {
          ...common,
          xaxis: { ...axisOf(axes[axis]), rangemode: "tozero" },
          yaxis: { ...axisOf(chart.title), ...logarithmic, range: range(data, isLogarithmic) },
          showlegend: position === 0 && count <= MERGED,
          legend: { traceorder: "normal", ...((narrow.matches || isMany) && below) },
          uirevision: [axis, scale, boxes.map((box) => box.checked)].join(), // a zoom stays until then
        });
        if (position === 0) listenToLegend(document.getElementById(metric));
      });
    });
    const view = chosen("view");
    for (const chart of personal) {
      const atEnd =
        view === "histogram"
          ? [axisOf(chart.title), axisOf("Share of the clients (%)")]
          : [axisOf("Share of the clients (%)"), axisOf(chart.title)];
      const show = (id, key, xaxis, yaxis) =>
        found.set(id, () => {
          const data = personalTraces(chart, style, view)[key];
          const legend = { ...common, legend: below, showlegend: count <= MERGED };
          plot(id, data, { ...legend, xaxis, yaxis: { ...yaxis, range: range(data, false) } });
        });
      const overRounds = axisOf(axes.round ?? "Communication rounds");
      show(`rounds-${chart.metric}`, "rounds", overRounds, axisOf(chart.title));
      show(`clients-${chart.metric}`, "atEnd", ...atEnd);
    }
    return found;
  }

  // Draws the charts on the screen at once, the others when the page has nothing else to do.
  let waiting = 0;
  function draw() {
    const shown = metricBoxes.filter((box) => box.checked).map((box) => box.value);
    for (const metric of Object.keys(charts)) {
      const element = document.getElementById(metric);
      const position = shown.indexOf(metric);
      element.hidden = position < 0;
      element.classList.toggle("first", position === 0 || (shown.length === 2 && position === 1));
    }
    showRanking(chosen("axis"));
    const later = [];
    for (const [id, drawChart] of drawings()) {
      const { top, bottom } = document.getElementById(id).getBoundingClientRect();
      if (bottom > 0 && top < innerHeight) drawChart();
      else later.push(drawChart);
    }
    clearTimeout(waiting);
    document.body.ariaBusy = "true";
    const drawNext = () => {
      later.shift()?.();
      document.body.ariaBusy = String(later.length > 0);
      if (later.length) waiting = setTimeout(drawNext);
    };
    waiting = setTimeout(drawNext);
  }

  function showRanking(axis) {
    const box = document.getElementById("rankings");
    for (const table of box.children) table.hidden = table.dataset.axis !== axis;
    if ([...box.children].some((table) => !table.hidden)) return;
    box.insertAdjacentHTML("beforeend", rankings[axis]);
    makeSortable(box.lastElementChild.querySelector("table"));
  }

  // The checkboxes say which curves all charts show; clicks in the legend change the checkboxes.
  function listenToLegend(chart) {
    if (chart.dataset.listening) return;
    chart.dataset.listening = "yes";
    chart.on("plotly_legendclick", ({ data, curveNumber }) => {
      boxes[data[curveNumber].meta].click();
      return false;
    });
    chart.on("plotly_legenddoubleclick", ({ data, curveNumber }) => {
      const only = boxes[data[curveNumber].meta];
      const alone = boxes.every((box) => box.checked === (box === only));
      boxes.forEach((box) => (box.checked = alone || box === only));
      draw();
      return false;
    });
  }

  // Among many curves: a text filters their names, and buttons choose among those that are left.
  function listenToFilter() {
    const filter = document.getElementById("filter");
    const matches = (box) => !box.parentElement.hidden;
    filter.addEventListener("input", () => {
      const text = filter.value.toLowerCase();
      boxes.forEach((box, index) => {
        box.parentElement.hidden = !curves[index].label.toLowerCase().includes(text);
      });
    });
    filter.addEventListener("change", (event) => event.stopPropagation()); // nothing to draw
    for (const button of document.querySelectorAll("[data-choose]")) {
      button.addEventListener("click", () => {
        const { choose } = button.dataset;
        const chosenBoxes = boxes.filter(matches).slice(0, choose === "all" ? undefined : +choose || 0);
        boxes.forEach((box) => (box.checked = chosenBoxes.includes(box)));
        draw();
      });
    }
  }

  // Each heading becomes a button that sorts the rows: upwards, and when pressed again, downwards.
  function makeSortable(table) {
    const [first, second] = table.tHead.rows;
    const headings = [...first.cells].flatMap((cell) =>
      cell.scope === "colgroup" ? [...second.cells] : [cell],
    );
    headings.forEach((heading, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...heading.childNodes);
      heading.append(button);
      button.addEventListener("click", () => {
        const upwards = heading.ariaSort !== "ascending";
        headings.forEach((other) => (other.ariaSort = null));
        heading.ariaSort = upwards ? "ascending" : "descending";
        const rows = [...table.tBodies[0].rows].sort((a, b) =>
          compare(a.cells[column], b.cells[column], upwards ? 1 : -1),
        );
        table.tBodies[0].append(...rows);
      });
    });
  }

  // Numbers come before texts, in either order: a dash is a target that was not reached.
  function compare(a, b, sign) {
    const numbers = [a, b].map((cell) => Number(cell.dataset.value ?? (cell.textContent.trim() || NaN)));
    if (numbers.some(Number.isNaN)) {
      const missing = numbers.map(Number.isNaN);
      return missing[0] - missing[1] || sign * a.textContent.localeCompare(b.textContent);
    }
    return sign * (numbers[0] - numbers[1]);
  }

  // The curves that are shown, a row per point, along the chosen axis.
  function csv() {
    const axis = chosen("axis");
    const shown = metricBoxes.filter((box) => box.checked).map((box) => box.value);
    const quote = (text) => `"${text.replaceAll('"', '""')}"`;
    const lines = [["curve", "metric", axes[axis], "mean", "low", "high"].map(quote).join(",")];
    curves.forEach((curve, index) => {
      if (!boxes[index].checked) return;
      for (const metric of shown) {
        const { x, mean, low = mean, high = mean } = averageOf(index, axis, metric);
        x.forEach((place, i) => {
          const numbers = [place, mean[i], low[i], high[i]];
          lines.push([quote(curve.label), quote(metric), ...numbers].join(","));
        });
      }
    });
    return `${lines.join("\n")}\n`;
  }

  document.getElementById("csv").addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([csv()], { type: "text/csv" }));
    link.download = "curves.csv";
    link.click();
    URL.revokeObjectURL(link.href);
  });

  for (const details of document.querySelectorAll("[data-clients]")) {
    details.addEventListener("toggle", () => {
      if (details.querySelector("table")) return;
      details.insertAdjacentHTML("beforeend", clients[details.dataset.clients]);
      makeSortable(details.querySelector("table"));
    });
  }

  draw();
  if (isMany) listenToFilter();
  document.querySelectorAll("[data-axis] table, .sortable table").forEach(makeSortable);
  for (const each of document.querySelectorAll(".controls")) each.addEventListener("change", draw);
  for (const query of [narrow, matchMedia("(prefers-color-scheme: dark)")]) {
    query.addEventListener("change", draw);
  }
})();
