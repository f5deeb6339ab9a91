"use strict";
// Shows the values of a chart's lines under the pointer, and smooths losses; charts work without it.
const pointsOf = (text) => text.split(" ").filter(Boolean).map((pair) => pair.split(",").map(Number));
const smoothing = document.querySelector("#smoothing");
if (smoothing) {
  smoothing.hidden = false;
  const input = smoothing.querySelector("input");
  const losses = [...document.querySelectorAll(".losses .line[points]:not(.strong)")].map((line) => [line, pointsOf(line.getAttribute("points"))]);
  const smooth = () => {
    const kept = Number(input.value);
    smoothing.querySelector("output").textContent = kept;
    for (const [line, points] of losses) {
      let sum = 0, weight = 0;
      line.setAttribute("points", points.map(([x, y]) => {
        sum = kept * sum + (1 - kept) * y;
        weight = kept * weight + 1 - kept;
        return `${x},${(sum / weight).toFixed(1)}`;
      }).join(" "));
    }
  };
  input.addEventListener("input", smooth);
  smooth(); // a browser may keep the value of a page that is loaded again
}
for (const svg of document.querySelectorAll(".plot > svg")) {
  const tip = svg.parentNode.querySelector(".tip"), rule = svg.querySelector(".rule");
  const axisOf = (text) => {
    const [low, high, start, end, isLog] = text.split(" ").map(Number);
    return (position) => {
      const part = (position - start) / (end - start);
      return isLog ? low * (high / low) ** part : low + part * (high - low);
    };
  };
  const xOf = axisOf(svg.dataset.x);
  const visible = (selector) => [...svg.querySelectorAll(selector)].filter((one) => getComputedStyle(one).display !== "none");
  const hide = () => { tip.hidden = true; rule.style.visibility = "hidden"; };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const frame = svg.getBoundingClientRect();
    const x = (event.clientX - frame.left) * 440 / frame.width;
    const [face] = visible(".face"), yOf = axisOf(face.dataset.y);
    const lines = visible(".line").filter((line) => face.contains(line)).map((line) => ({
      name: line.dataset.name,
      color: line.getAttribute("class").split(" ")[1],
      points: pointsOf(line.getAttribute("points")),
    })).filter((line) => line.points.length);
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
