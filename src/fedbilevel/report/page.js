"use strict";
(() => {
  const { axes, charts, curves, personal } = JSON.parse(document.getElementById("data").textContent);
  const controls = document.querySelector(".controls");
  const boxes = [...controls.querySelectorAll("[name=curve]")];
  const metricBoxes = [...controls.querySelectorAll("[name=metric]")];
  const narrow = matchMedia("(max-width: 44rem)");
  const touch = matchMedia("(pointer: coarse)");

  const floats = (base64) => {
    const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
    return new Float32Array(bytes.buffer);
  };
  // Plotly interprets tags in text, but labels are plain text.
  const escapeTags = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

  // The mean over a window of up to `width` values on each side.
  function smooth(values, width) {
    if (width === 0) return values;
    return values.map((_, i) => {
      const reach = Math.min(width, i, values.length - 1 - i); // the ends stay what they are
      const window = values.slice(i - reach, i + reach + 1);
      return window.reduce((sum, value) => sum + value, 0) / window.length;
    });
  }

  function seedTraces(curve, axis, metric, base, width) {
    return (curve.seeds ?? []).map(({ seed, numbers }) => {
      const divisor = curve.divisors[axis];
      const x = floats(numbers[axis]).map((value) => value / divisor);
      const line = { ...base.line, width: 1 };
      const hovertemplate = `%{y:.4~g} (seed ${seed})`;
      const y = smooth(floats(numbers[metric]), width);
      return { ...base, x, y, line, hovertemplate, opacity: 0.6, showlegend: false };
    });
  }

  function traces(curve, index, axis, metric, style, { width, seeds }) {
    const values = curve.values[axis]?.[metric];
    if (!values) return [];
    const shown = boxes[index].checked;
    const colour = style.getPropertyValue(`--curve-${curve.colour}`);
    const x = floats(values.x);
    const mean = {
      x,
      y: smooth(floats(values.mean), width),
      name: escapeTags(curve.label),
      mode: x.length > 1 ? "lines" : "markers",
      line: { color: colour, width: 2, dash: curve.dash },
      marker: { color: colour },
      meta: index,
      legendrank: index,
      visible: shown || "legendonly",
      hovertemplate: "%{y:.4~g}",
    };
    if (!values.low) return [mean];
    if (seeds) {
      const visible = shown;
      return [...seedTraces(curve, axis, metric, { ...mean, visible }, width), mean];
    }
    const low = smooth(floats(values.low), width);
    const high = smooth(floats(values.high), width);
    const edge = {
      x,
      mode: "lines",
      line: { width: 0 },
      showlegend: false,
      hoverinfo: "skip",
      visible: shown,
    };
    mean.customdata = Array.from(low, (value, i) => [value, high[i]]);
    mean.hovertemplate += " (%{customdata[0]:.4~g} to %{customdata[1]:.4~g})";
    const band = { ...edge, y: high, fill: "tonexty", fillcolor: `${colour}28` };
    return [{ ...edge, y: low }, band, mean];
  }

  const DASHES = ["solid", "dash", "dot"];

  // Two charts per metric of single clients: over rounds, and over the clients at the end.
  function personalTraces(chart, style) {
    const rounds = [];
    const clients = [];
    for (const { curve, lines, values } of chart.curves) {
      const { label, colour } = curves[curve];
      const color = style.getPropertyValue(`--curve-${colour}`);
      const visible = boxes[curve].checked;
      const base = { visible, legendgroup: label, mode: "lines" };
      Object.entries(lines).forEach(([title, { x, y }], index) => {
        const line = { color, width: 2, dash: DASHES[index] };
        const name = escapeTags(label);
        const hovertemplate = `%{y:.4~g} (${title.toLowerCase()})`;
        const points = { x: floats(x), y: floats(y) };
        const mode = points.x.length > 1 ? "lines" : "markers";
        rounds.push({ ...base, ...points, name, mode, line, hovertemplate, showlegend: false });
      });
      const sorted = floats(values);
      const x = Array.from(sorted, (_, i) => (100 * (i + 1)) / sorted.length);
      const line = { color, width: 2, shape: "vh" };
      const hovertemplate = "%{y:.4~g}";
      const name = escapeTags(label);
      clients.push({ ...base, x, y: sorted, name, line, hovertemplate, showlegend: true });
    }
    return { rounds, clients };
  }

  // The range of the numbers that are shown, with a margin.
  function range(data, logarithmic) {
    let low = Infinity;
    let high = -Infinity;
    for (const trace of data) {
      if (trace.visible !== true) continue;
      for (const value of trace.y) {
        if (!Number.isFinite(value) || (logarithmic && value <= 0)) continue;
        const place = logarithmic ? Math.log10(value) : value;
        low = Math.min(low, place);
        high = Math.max(high, place);
      }
    }
    if (low > high) return undefined;
    const margin = 0.04 * (high - low || Math.abs(high) || 1);
    return [low - margin, high + margin];
  }

  function draw() {
    const axis = controls.querySelector("[name=axis]:checked").value;
    const chosen = controls.querySelector("[name=scale]:checked").value;
    const options = {
      width: Number(controls.querySelector("[name=smoothing]").value),
      seeds: controls.querySelector("[name=seeds]")?.checked,
    };
    const style = getComputedStyle(document.documentElement);
    const [text, muted, border, background] = ["text", "muted", "border", "background"].map(
      (name) => style.getPropertyValue(`--${name}`),
    );
    const shown = metricBoxes.filter((box) => box.checked).map((box) => box.value);
    const scale = (title) => ({
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
      hovermode: narrow.matches ? "closest" : "x unified",
      hoverlabel: { bgcolor: background, bordercolor: border, font: { color: text } },
      dragmode: touch.matches ? false : "zoom", // a finger on a chart scrolls the page
    };
    const plot = (id, data, layout) => {
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
    };
    Object.entries(charts).forEach(([metric, chart]) => {
      const element = document.getElementById(metric);
      const position = shown.indexOf(metric);
      element.hidden = position < 0;
      element.classList.toggle("first", position === 0 || (shown.length === 2 && position === 1));
      if (element.hidden) return;
      const isLogarithmic = chosen === "automatic" ? chart.log : chosen === "logarithmic";
      const logarithmic = isLogarithmic && { type: "log", nticks: 4, exponentformat: "power" };
      const data = curves.flatMap((curve, index) =>
        traces(curve, index, axis, metric, style, options),
      );
      const layout = {
        ...common,
        xaxis: { ...scale(axes[axis]), rangemode: "tozero" },
        yaxis: { ...scale(chart.title), ...logarithmic, range: range(data, isLogarithmic) },
        showlegend: position === 0,
        legend: {
          traceorder: "normal",
          ...(narrow.matches && { orientation: "h", y: -0.25, yanchor: "top" }),
        },
        uirevision: [axis, chosen, boxes.map((box) => box.checked)].join(), // until then, a zoom stays
      };
      plot(metric, data, layout);
    });
    for (const chart of personal) {
      const { rounds, clients } = personalTraces(chart, style);
      const legend = { orientation: "h", y: -0.25, yanchor: "top" };
      const show = (id, data, title) => {
        const yaxis = { ...scale(chart.title), range: range(data, false) };
        plot(id, data, { ...common, legend, yaxis, xaxis: { ...scale(title) } });
      };
      show(`rounds-${chart.metric}`, rounds, axes.round ?? "Communication rounds");
      show(`clients-${chart.metric}`, clients, "Share of the clients (%)");
    }
    listenToLegend(document.getElementById(shown[0]));
    for (const table of document.querySelectorAll("[data-axis]")) {
      table.hidden = table.dataset.axis !== axis;
    }
  }

  // The checkboxes say which curves all charts show; clicks in the legend change the checkboxes.
  function listenToLegend(chart) {
    if (!chart || chart.dataset.listening) return;
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
    const numbers = [a, b].map((cell) => Number(cell.dataset.value ?? NaN));
    if (numbers.some(Number.isNaN)) {
      const missing = numbers.map(Number.isNaN);
      return missing[0] - missing[1] || sign * a.textContent.localeCompare(b.textContent);
    }
    return sign * (numbers[0] - numbers[1]);
  }

  // The curves that are shown, a row per point, along the chosen axis.
  function csv() {
    const axis = controls.querySelector("[name=axis]:checked").value;
    const shown = metricBoxes.filter((box) => box.checked).map((box) => box.value);
    const quote = (text) => `"${text.replaceAll('"', '""')}"`;
    const lines = [["curve", "metric", axes[axis], "mean", "low", "high"].map(quote).join(",")];
    curves.forEach((curve, index) => {
      if (!boxes[index].checked) return;
      for (const metric of shown) {
        const values = curve.values[axis]?.[metric];
        if (!values) continue;
        const mean = floats(values.mean);
        const low = values.low ? floats(values.low) : mean;
        const high = values.high ? floats(values.high) : mean;
        floats(values.x).forEach((x, i) => {
          lines.push([quote(curve.label), quote(metric), x, mean[i], low[i], high[i]].join(","));
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

  draw();
  document.querySelectorAll("[data-axis] table, .sortable table").forEach(makeSortable);
  controls.addEventListener("change", draw);
  for (const query of [narrow, matchMedia("(prefers-color-scheme: dark)")]) {
    query.addEventListener("change", draw);
  }
})();
