"use strict";
(() => {
  const { axes, charts, curves } = JSON.parse(document.getElementById("data").textContent);
  const controls = document.querySelector(".controls");
  const boxes = [...controls.querySelectorAll("[name=curve]")];
  const narrow = matchMedia("(max-width: 44rem)");
  const touch = matchMedia("(pointer: coarse)");

  const floats = (base64) => {
    const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
    return new Float32Array(bytes.buffer);
  };
  // Plotly interprets tags in text, but labels are plain text.
  const escapeTags = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

  function traces(curve, index, axis, metric, style) {
    const values = curve.values[axis]?.[metric];
    if (!values) return [];
    const shown = boxes[index].checked;
    const colour = style.getPropertyValue(`--curve-${curve.colour}`);
    const x = floats(values.x);
    const mean = {
      x,
      y: floats(values.mean),
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
    const low = floats(values.low);
    const high = floats(values.high);
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

  function draw() {
    const axis = controls.querySelector("[name=axis]:checked").value;
    const style = getComputedStyle(document.documentElement);
    const [text, muted, border, background] = ["text", "muted", "border", "background"].map(
      (name) => style.getPropertyValue(`--${name}`),
    );
    Object.entries(charts).forEach(([metric, chart], position) => {
      const scale = (title) => ({
        title: { text: title, font: { size: 13 }, standoff: 10 },
        color: muted,
        gridcolor: border,
        linecolor: border,
        zeroline: false,
        automargin: true,
      });
      const logarithmic = chart.log && { type: "log", nticks: 4, exponentformat: "power" };
      const layout = {
        font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: text },
        paper_bgcolor: background,
        plot_bgcolor: background,
        margin: { l: 56, r: 12, t: 28, b: 48 },
        xaxis: { ...scale(axes[axis]), rangemode: "tozero" },
        yaxis: { ...scale(chart.title), ...logarithmic },
        hovermode: narrow.matches ? "closest" : "x unified",
        hoverlabel: { bgcolor: background, bordercolor: border, font: { color: text } },
        dragmode: touch.matches ? false : "zoom", // a finger on a chart scrolls the page
        showlegend: position === 0,
        legend: {
          traceorder: "normal",
          ...(narrow.matches && { orientation: "h", y: -0.25, yanchor: "top" }),
        },
        uirevision: axis, // a zoom is kept until the axis changes
      };
      const data = curves.flatMap((curve, index) => traces(curve, index, axis, metric, style));
      const options = {
        responsive: true,
        displaylogo: false,
        displayModeBar: touch.matches ? false : "hover",
        modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
      };
      Plotly.react(metric, data, layout, options);
    });
    for (const table of document.querySelectorAll("[data-axis]")) {
      table.hidden = table.dataset.axis !== axis;
    }
  }

  draw();
  const legend = document.querySelector(".chart");
  // The checkboxes say which curves all charts show; clicks in the legend change the checkboxes.
  legend.on("plotly_legendclick", ({ data, curveNumber }) => {
    boxes[data[curveNumber].meta].click();
    return false;
  });
  legend.on("plotly_legenddoubleclick", ({ data, curveNumber }) => {
    const only = boxes[data[curveNumber].meta];
    const alone = boxes.every((box) => box.checked === (box === only));
    boxes.forEach((box) => (box.checked = alone || box === only));
    draw();
    return false;
  });
  controls.addEventListener("change", draw);
  for (const query of [narrow, matchMedia("(prefers-color-scheme: dark)")]) {
    query.addEventListener("change", draw);
  }
})();
