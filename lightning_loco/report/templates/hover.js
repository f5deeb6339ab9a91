"use strict";
// Shows the values of a chart's lines under the pointer; the charts work without it.
for (const svg of document.querySelectorAll(".plot > svg")) {
  const tip = svg.parentNode.querySelector(".tip"), rule = svg.querySelector(".rule");
  const axisOf = (text) => {
    const [low, high, start, end, isLog] = text.split(" ").map(Number);
    return (position) => {
      const part = (position - start) / (end - start);
      return isLog ? low * (high / low) ** part : low + part * (high - low);
    };
  };
  const xOf = axisOf(svg.dataset.x), yOf = axisOf(svg.dataset.y);
  const lines = [...svg.querySelectorAll("polyline")].map((line) => ({
    name: line.dataset.name,
    color: line.getAttribute("class").split(" ")[1],
    points: line.getAttribute("points").split(" ").filter(Boolean).map((p) => p.split(",").map(Number)),
  })).filter((line) => line.points.length);
  const hide = () => { tip.hidden = true; rule.style.visibility = "hidden"; };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const frame = svg.getBoundingClientRect();
    const x = (event.clientX - frame.left) * 440 / frame.width;
    const distance = (point) => Math.abs(point[0] - x);
    const near = lines.map((line) => ({
      ...line, point: line.points.reduce((best, p) => (distance(p) < distance(best) ? p : best)),
    })).filter((line) => distance(line.point) < 15);
    if (!near.length) return hide();
    const at = near.reduce((best, line) => (distance(line.point) < distance(best) ? line.point : best), near[0].point)[0];
    rule.setAttribute("x1", at);
    rule.setAttribute("x2", at);
    rule.style.visibility = "visible";
    const rows = [`${svg.dataset.xLabel}: ${Number(xOf(at).toPrecision(4))}`];
    tip.replaceChildren(...[rows[0], ...near].map((row) => {
      const div = document.createElement("div");
      if (typeof row === "string") {
        div.textContent = row;
      } else {
        const swatch = document.createElement("span");
        swatch.className = `swatch ${row.color}`;
        div.append(swatch, `${row.name}: ${Number(yOf(row.point[1]).toPrecision(4))}`);
      }
      return div;
    }));
    tip.hidden = false;
    const left = at < 240;
    tip.style.left = left ? `${(at + 12) / 4.4}%` : "auto";
    tip.style.right = left ? "auto" : `${(440 - at + 12) / 4.4}%`;
  });
}
