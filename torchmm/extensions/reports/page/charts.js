"use strict";
// Curves of a page, and pictures that can be zoomed. Data stand in the page, beside each chart.

const WIDTH = 380, HEIGHT = 190, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 22;
const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "5 3", "2 2", "7 3 2 3"];

function element(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.appendChild(made);
  return made;
}

function shown(value) {
  const size = Math.abs(value);
  if (size !== 0 && size < 0.001) return value.toExponential(1);
  if (size >= 1e6) return (value / 1e6).toFixed(1) + " M";
  if (size >= 1e4) return (value / 1e3).toFixed(0) + " k";
  return Number(value.toPrecision(4)).toString();
}

// Round numbers that divide a range into about `count` parts.
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= rough);
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-6; tick += step) {
    found.push(tick);
  }
  return found;
}

function draw(figure) {
  const told = JSON.parse(figure.querySelector("script").textContent);
  const all = told.curves.flatMap((curve) => curve.points);
  const steps = all.map((point) => point[0]), values = all.map((point) => point[1]);
  const first = Math.min(...steps), last = Math.max(...steps, first + 1);
  let low = Math.min(...values, told.zero ? 0 : Infinity), high = Math.max(...values);
  // A first step takes many times as long as all others, which would be a line along the axis.
  const usual = values.slice().sort((a, b) => a - b)[Math.floor(0.97 * (values.length - 1))];
  const highest = high;
  if (told.zero && high > 3 * usual && usual > 0) high = 1.3 * usual;
  if (high <= low) high = low + (Math.abs(low) || 1);
  const x = (step) => LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT);
  const y = (value) => Math.max(TOP, HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM));

  const svg = element("svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img"});
  for (const tick of ticks(low, high, 4)) {
    element("line", {class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick)}, svg);
    const label = element("text", {x: LEFT - 5, y: y(tick) + 4, "text-anchor": "end"}, svg);
    label.textContent = shown(tick);
  }
  for (const tick of ticks(first, last, 5)) {
    if (!Number.isInteger(tick)) continue;
    const atEnd = x(tick) > WIDTH - RIGHT - 15;  // half of it would be cut off
    const place = {x: atEnd ? WIDTH : x(tick), "text-anchor": atEnd ? "end" : "middle"};
    const label = element("text", {...place, y: HEIGHT - 6}, svg);
    label.textContent = shown(tick);
  }
  for (const curve of told.curves) {
    const place = curve.points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`);
    const look = {class: "curve", stroke: `var(--c${curve.color % 6})`,
                  "stroke-dasharray": DASHES[curve.dash % 4], points: place.join(" ")};
    if (place.length > 1) element("polyline", look, svg);
    else element("circle", {cx: x(curve.points[0][0]), cy: y(curve.points[0][1]), r: 3,
                            fill: look.stroke}, svg);
  }
  const cursor = element("line", {class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, x1: -9, x2: -9}, svg);
  figure.appendChild(svg);
  const legend = document.createElement("div");
  legend.className = "legend";
  figure.appendChild(legend);

  // Without a step: the newest values.
  function tell(step) {
    legend.replaceChildren();
    for (const curve of told.curves) {
      const points = curve.points;
      let near = points[points.length - 1];
      if (step !== null) {
        for (const point of points) {
          if (Math.abs(point[0] - step) < Math.abs(near[0] - step)) near = point;
        }
      }
      const entry = document.createElement("span"), mark = document.createElement("i");
      mark.style.background = `var(--c${curve.color % 6})`;
      entry.append(mark, `${curve.name} ${shown(near[1])}`);
      if (step !== null) entry.append(` (step ${near[0]})`);
      legend.appendChild(entry);
    }
    if (highest > high) legend.append(`cut at the top; highest ${shown(highest)}`);
  }
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * WIDTH;
    const step = first + (at - LEFT) / (WIDTH - LEFT - RIGHT) * (last - first);
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    tell(step);
  });
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("x1", -9);
    cursor.setAttribute("x2", -9);
    tell(null);
  });
  tell(null);
}

function zoomable(frame) {
  const image = frame.querySelector("img");
  let scale = 1, left = 0, top = 0;
  const put = () => { image.style.transform = `translate(${left}px, ${top}px) scale(${scale})`; };
  frame.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = frame.getBoundingClientRect();
    const across = event.clientX - box.left, down = event.clientY - box.top;
    const factor = Math.max(Math.exp(-event.deltaY / 400), 1 / scale);
    left = across - factor * (across - left);
    top = down - factor * (down - top);
    scale *= factor;
    put();
  }, {passive: false});
  frame.addEventListener("pointermove", (event) => {
    if (!(event.buttons & 1)) return;
    left += event.movementX;
    top += event.movementY;
    put();
  });
  frame.addEventListener("dblclick", () => {
    [scale, left, top] = [1, 0, 0];
    put();
  });
}

document.querySelectorAll(".chart").forEach(draw);
document.querySelectorAll(".zoom").forEach(zoomable);
// A killed process cannot write that it has ended, so the page tells from its own age.
const silent = Date.now() / 1000 - Number(document.body.dataset.writtenS);
const state = document.querySelector(".tiles.running dd");
if (state && silent > 600) {
  state.textContent = `no update for ${Math.round(silent / 60)} min; killed?`;
}

const renewed = Number(document.body.dataset.renewS);
if (renewed) setTimeout(() => location.reload(), 1000 * renewed);
