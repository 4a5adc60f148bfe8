"use strict";
(() => {
  const tip = document.getElementById("tip");
  const xmlns = "http://www.w3.org/2000/svg";

  const put = (event) => {
    const room = 14, box = tip.getBoundingClientRect();
    const right = event.clientX + room + box.width < innerWidth;
    const left = right ? event.clientX + room : event.clientX - room - box.width;
    const top = Math.min(event.clientY + room, innerHeight - box.height - 4);
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = Math.max(4, top) + "px";
    tip.style.visibility = "visible";
  };

  const nearest = (sorted, wanted) => {
    let low = 0, high = sorted.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (sorted[middle] < wanted) low = middle; else high = middle;
    }
    return wanted - sorted[low] < sorted[high] - wanted ? low : high;
  };

  const upward = (axis, logarithmic, value) => {
    let [least, greatest, start, stop] = axis;
    if (logarithmic) [least, greatest, value] = [least, greatest, value].map(Math.log);
    return start + (value - least) / (greatest - least) * (stop - start);
  };

  const follow = (figure) => {
    const svg = figure.querySelector("svg"), cursor = svg.querySelector(".cursor");
    const { x, y, curves } = JSON.parse(figure.querySelector("script").textContent);
    const [least, greatest, left, right] = x;
    const move = (event) => {
      if (event.target.closest("[data-tip]")) { leave(); return; }
      const box = svg.getBoundingClientRect();
      const at = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
      const wanted = least + (at - left) / (right - left) * (greatest - least);
      const closest = curves
        .map((curve) => curve.x[nearest(curve.x, wanted)])
        .reduce((a, b) => Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a);
      const place = left + (closest - least) / (greatest - least) * (right - left);
      const logarithmic = y.length > 1 && document.body.classList.contains("as-log");
      cursor.replaceChildren();
      const line = document.createElementNS(xmlns, "line");
      for (const [name, value] of [["x1", place], ["x2", place], ["y1", y[0][3]], ["y2", y[0][2]]])
        line.setAttribute(name, value);
      cursor.append(line);
      tip.replaceChildren("step " + closest.toLocaleString("en"));
      for (const curve of curves) {
        const number = nearest(curve.x, closest);
        const shown = document.createElement("div"), colour = document.createElement("i");
        colour.className = "c" + curve.colour;
        const where = curve.x[number] === closest ? "" : " (step " + curve.x[number] + ")";
        shown.append(colour, curve.name + " " + curve.y[number] + where);
        tip.append(shown);
        if (where) continue;
        const dot = document.createElementNS(xmlns, "circle");
        dot.setAttribute("class", "c" + curve.colour);
        dot.setAttribute("r", 3.6);
        dot.setAttribute("cx", place);
        dot.setAttribute("cy", upward(y[logarithmic ? 1 : 0], logarithmic, curve.y[number]));
        cursor.append(dot);
      }
      put(event);
    };
    const leave = () => { cursor.replaceChildren(); };
    svg.addEventListener("pointermove", move);
    svg.addEventListener("pointerdown", move);
    svg.addEventListener("pointerleave", () => { leave(); tip.style.visibility = "hidden"; });
  };

  document.querySelectorAll("figure.chart").forEach(follow);
  const tell = (event) => {
    const told = event.target.closest && event.target.closest("[data-tip]");
    if (told) {
      tip.replaceChildren(told.dataset.tip);
      put(event);
    } else if (!(event.target.closest && event.target.closest("figure.chart svg"))) {
      tip.style.visibility = "hidden";
    }
  };
  document.addEventListener("pointermove", tell);
  document.addEventListener("pointerdown", tell);
  const log = document.getElementById("log");
  if (log) {
    const change = () => document.body.classList.toggle("as-log", log.checked);
    log.addEventListener("change", change);
    change();
  }
})();
