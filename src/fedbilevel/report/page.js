"use strict";
(() => {
  const { axes, charts, curves } = JSON.parse(document.getElementById("data").textContent);
  const controls = document.querySelector(".controls");
  const boxes = [...controls.querySelectorAll("[name=curve]")];
  const narrow = matchMedia("(max-width: 44rem)");
  const touch = matchMedia("(pointer: coarse)");

  const floats = (text) => new Float32Array(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
  // plotly reads tags in the text it is given; labels are plain text.
  const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

  function traces(curve, index, axis, metric, style) {
    const values = curve.values[axis]?.[metric];
    if (!values) return [];
    const shown = boxes[index].checked;
    const colour = style.getPropertyValue(`--curve-${curve.colour}`);
    const x = floats(values.x);
    const mean = {
      x,
      y: floats(values.mean),
      name: plain(curve.label),
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
    const edge = { x, mode: "lines", line: { width: 0 }, showlegend: false, hoverinfo: "skip", visible: shown };
    mean.customdata = Array.from(low, (value, i) => [value, high[i]]);
    mean.hovertemplate += " (%{customdata[0]:.4~g} to %{customdata[1]:.4~g})";
    return [{ ...edge, y: low }, { ...edge, y: high, fill: "tonexty", fillcolor: `${colour}28` }, mean];
  }

  function draw() {
    const axis = controls.querySelector("[name=axis]:checked").value;
    const style = getComputedStyle(document.documentElement);
    const [text, quiet, line, back] = ["text", "quiet", "line", "back"].map((n) => style.getPropertyValue(`--${n}`));
    Object.entries(charts).forEach(([metric, chart], place) => {
      const scale = (title) => ({
        title: { text: title, font: { size: 13 }, standoff: 10 },
        color: quiet,
        gridcolor: line,
        linecolor: line,
        zeroline: false,
        automargin: true,
      });
      const logarithmic = chart.log && { type: "log", nticks: 4, exponentformat: "power" };
      const layout = {
        font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: text },
        paper_bgcolor: back,
        plot_bgcolor: back,
        margin: { l: 56, r: 12, t: 28, b: 48 },
        xaxis: { ...scale(axes[axis]), rangemode: "tozero" },
        yaxis: { ...scale(chart.title), ...logarithmic },
        hovermode: narrow.matches ? "closest" : "x unified",
        hoverlabel: { bgcolor: back, bordercolor: line, font: { color: text } },
        dragmode: touch.matches ? false : "zoom", // a finger on a chart scrolls the page
        showlegend: place === 0,
        legend: { traceorder: "normal", ...(narrow.matches ? { orientation: "h", y: -0.25, yanchor: "top" } : {}) },
        uirevision: axis, // a zoom survives all but a change of axis
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
    document.querySelectorAll("[data-axis]").forEach((table) => (table.hidden = table.dataset.axis !== axis));
  }

  draw();
  const legend = document.querySelector(".chart");
  // The checkboxes hold what is shown; the legend of the first chart works through them, for all charts.
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
  for (const query of [narrow, matchMedia("(prefers-color-scheme: dark)")]) query.addEventListener("change", draw);
})();
