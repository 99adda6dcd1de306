// Draw the matrices to scale with the blocks in use, and the blocks of one step close up.
const SVG = "http://www.w3.org/2000/svg";
function el(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
const text = (words, x, y, more = {}) => el("text", { x, y, ...more }, words);
const rect = (x, y, width, height, more = {}) => el("rect", { x, y, width: Math.max(0, width), height: Math.max(0, height), ...more });

function hatch(id, color) {
  const line = el("path", { d: "M0 7L7 0", stroke: color, "stroke-width": 1.6 });
  return el("pattern", { id, width: 7, height: 7, patternUnits: "userSpaceOnUse" }, line);
}

// Place a matrix on the screen: (x, y) of its first element, pixels of a row and of a column.
class Frame {
  constructor(name, x, y, rows, columns, down, across) {
    Object.assign(this, { name, x, y, rows, columns, down, across });
  }
  box(top, left, height, width, more) {
    return rect(this.x + left * this.across, this.y + top * this.down, width * this.across, height * this.down, more);
  }
  // Draw at least 3 pixels each way, to be visible, and stay within the frame.
  seen(top, left, height, width, more) {
    const w = Math.max(3, width * this.across), h = Math.max(3, height * this.down);
    return rect(this.x + left * this.across, this.y + top * this.down, w, h, more);
  }
  path(rectangles) {
    const { x, y, across, down } = this;
    return rectangles.map(([top, left, height, width]) =>
      `M${x + left * across} ${y + top * down}h${width * across}v${height * down}h${-width * across}z`).join("");
  }
  // Return lines between tiles, none where they are too close to tell apart.
  grid(down_, across_) {
    const { x, y, across, down, rows, columns } = this;
    const lines = ({ size, count, most }, scale) =>
      Math.min(size, most) * scale < 4 ? [] : Array.from({ length: count - 1 }, (_, i) => Math.min((i + 1) * size, most) * scale);
    const d = lines(down_, down).map((top) => `M${x} ${y + top}h${columns * across}`).join("")
      + lines(across_, across).map((left) => `M${x + left} ${y}v${rows * down}`).join("");
    return el("path", { d, stroke: "var(--grid)", fill: "none" });
  }
}

const every = (size, count, most = Infinity) => ({ size, count, most });  // where tiles start
const least = (lengths) => lengths.map((length) => Math.max(length, Math.max(...lengths) / 7));
const number = (value) => value.toLocaleString("en-US");
const picture = document.getElementById("picture"), close_ = document.getElementById("close");
let frames = {}, live = null;

function begin(svg, width, height, label) {
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.style.height = `${height}px`;
  const defs = el("defs", {}, hatch(`${svg.id}-mask`, "var(--mask)"), hatch(`${svg.id}-faint`, "var(--line)"));
  svg.replaceChildren(defs);
}

function room() {
  const width = Math.max(240, picture.parentElement.clientWidth - 2 * parseFloat(getComputedStyle(picture.parentElement).paddingLeft));
  return [width, width > 560 ? Math.min(620, Math.max(380, innerHeight * 0.66)) : width * 1.25];
}

// Draw what never moves (frames, grids, names), anew when the window's width changes.
function layOut() {
  const [width, height] = room();
  const notes = product ? layOutProduct(width, height) : layOutMove(width, height);
  document.getElementById("scale").textContent = notes;
  live = el("g", { id: "live" });
  picture.append(live, ...picture.querySelectorAll(":scope > text"));  // lines go behind names
}

// Write the name of a matrix and its size, in letters too where there is room.
function named(frame, key, size, letters, y, width) {
  const room = (width - frame.x - 30) / 6.6, words = (letters + size).length <= room ? letters + size : size;
  const label = text("", words.length <= room ? frame.x : Math.max(0, width - 30 - 6.6 * words.length), y);
  label.append(el("tspan", { style: `font: italic 700 18px Georgia, serif; fill: var(--${key}-ink, var(--${key}))` }, frame.name));
  label.append(el("tspan", { dx: 7 }, words));
  return label;
}

function scaleNote(real, shown) {
  return real.every((length, i) => length === shown[i]) ? "" : "Thin sides are drawn wider than they are, so that they can be seen.";
}

function layOutProduct(width, height) {
  const [tall, wide] = [F.rows * F.covers[0], F.columns * F.covers[1]], deep = F.blocks * F.block_k;
  const shown = least([tall, wide, deep]), [m, n, k] = shown, gap = 40, top = F.matrices > 1 ? 36 : 24, bottom = 40;
  const scale = Math.min((width - gap - 18) / (k + n), (height - top - gap - bottom) / (k + m));
  const down = (m * scale) / tall, across = (n * scale) / wide, depth = (k * scale) / deep;
  const x = 4 + (width - 8 - (k + n) * scale - gap) / 2, cx = x + k * scale + gap, cy = top + k * scale + gap;
  begin(picture, width, cy + m * scale + bottom);
  frames = {
    a: new Frame("A", x, cy, F.m, F.k, down, depth),
    b: new Frame("B", cx, top, F.k, F.n, depth, across),
    c: new Frame("C", cx, cy, F.m, F.n, down, across),
  };
  const sizes = { a: ["M", F.m, "K", F.k], b: ["K", F.k, "N", F.n], c: ["M", F.m, "N", F.n] };
  const [downs, rights, deeps] = [every(F.covers[0], F.rows), every(F.covers[1], F.columns), every(F.block_k, F.blocks)];
  const lines = { a: [downs, deeps], b: [deeps, rights], c: [downs, rights] };
  const spans = { a: [tall, deep], b: [deep, wide], c: [tall, wide] };
  for (const [key, frame] of Object.entries(frames)) {
    for (let i = Math.min(2, F.matrices - 1); i > 0; i--)
      picture.append(rect(frame.x + 4 * i, frame.y - 4 * i, F_width(frame), F_height(frame), { fill: "var(--card)", stroke: "var(--line)" }));
    picture.append(frame.box(0, 0, ...spans[key], { fill: `url(#picture-faint)`, opacity: 0.6 }));
    picture.append(frame.box(0, 0, frame.rows, frame.columns, { fill: "var(--empty)", stroke: "var(--soft)", "data-frame": key }));
    picture.append(frame.grid(...lines[key]));
    const [r, rows, c, columns] = sizes[key], below = key === "c";
    const y = below ? frame.y + spans.c[0] * down + 20 : frame.y - (F.matrices > 1 ? 15 : 7);
    picture.append(named(frame, key, `${number(rows)} × ${number(columns)}`, `${r} × ${c} = `, y, width));
  }
  return scaleNote([tall, wide, deep], shown);
}

const F_width = (frame) => frame.columns * frame.across, F_height = (frame) => frame.rows * frame.down;

function layOutMove(width, height) {
  const turned = F.turned, shown = least([F.m, F.n]), [m, n] = shown, gap = 56, top = F.matrices > 1 ? 34 : 26;
  const scale = Math.min((width - gap - 20) / (turned ? m + n : 2 * n), (height - top - 46) / (turned ? Math.max(m, n) : m));
  const [down, across] = [(m * scale) / F.m, (n * scale) / F.n], out = turned ? m : n;
  const x = 4 + (width - 8 - (n + out) * scale - gap) / 2, ox = x + n * scale + gap;
  begin(picture, width, top + Math.max(m, turned ? n : m) * scale + 34);
  frames = {
    x: new Frame("x", x, top, F.m, F.n, down, across),
    out: turned ? new Frame("out", ox, top, F.n, F.m, across, down) : new Frame("out", ox, top, F.m, F.n, down, across),
  };
  const downs = every(F.covers[0], F.rows, F.whole - F.covers[0]), rights = every(F.covers[1], F.columns, F.n - F.covers[1]);
  for (const [key, frame] of Object.entries(frames)) {
    for (let i = Math.min(2, F.matrices - 1); i > 0; i--)
      picture.append(rect(frame.x + 4 * i, frame.y - 4 * i, F_width(frame), F_height(frame), { fill: "var(--card)", stroke: "var(--line)" }));
    picture.append(frame.box(0, 0, frame.rows, frame.columns, { fill: "var(--empty)", stroke: "var(--soft)", "data-frame": key }));
    picture.append(key === "out" && turned ? frame.grid(rights, downs) : frame.grid(downs, rights));
    const size = `${number(frame.rows)} × ${number(frame.columns)}`;
    const y = key === "x" ? frame.y - (F.matrices > 1 ? 14 : 8) : frame.y + F_height(frame) + 20;
    picture.append(named(frame, key === "x" ? "a" : "c", size, "", y, width));
  }
  return scaleNote([F.m, F.n], shown);
}

// Convert rectangles of tiles to rectangles of elements of C, or of x.
function elementsOf(rectangles) {
  const [height, width] = F.covers;
  return rectangles.map(([row, column, rows, columns]) => {
    const top = row * height, left = column * width;
    return [top, left, Math.min(F.m, (row + rows) * height) - top, Math.min(F.n, (column + columns) * width) - left];
  });
}

// Draw the part of a block inside its operand, and hatched the masked part.
function blockOf(frame, block, color, more = {}) {
  const { top, left, height, width, rows, columns } = block, parts = [];
  const masked = { fill: `url(#picture-mask)`, stroke: "var(--mask)", "stroke-width": 1, class: "masked" };
  if (rows < height) parts.push(frame.box(top + rows, left, height - rows, width, masked));
  if (columns < width) parts.push(frame.box(top, left + columns, rows, width - columns, masked));
  parts.push(frame.seen(top, left, rows, columns, { fill: color, stroke: color, "stroke-width": 1, ...more }));
  return parts;
}

function tint(frame, rectangles, color, opacity, id) {
  return el("path", { d: frame.path(rectangles), fill: color, "fill-rule": "evenodd", opacity, id });
}

// Draw the strips along K that were loaded before this step.
function loaded(frame, block, along, turn, step, color) {
  const strips = [], count = F.parts === 1 ? Math.min(step, 1) : step, size = F.block_k * (F.parts === 1 ? step : 1);
  for (let i = 0; i < count; i++) {
    const k = depthAt(turn, i);
    strips.push(along === "row" ? [block.top, k, block.rows, size] : [k, block.left, size, block.columns]);
  }
  return tint(frame, strips, color, 0.3);
}

function drawTurn(state) {
  const { turn, step, group } = state, { a, b, c } = frames, now = stepOf(turn, step, group), at = place(turn, group);
  const wave = Math.floor(turn / F.at_once), first = wave * F.at_once, steps = stepsOf(turn);
  const parts = [];
  if (F.parts === 1) parts.push(tint(c, elementsOf(madeIn(0, first, at.matrix, group)), "var(--c)", 0.4, "done"));
  parts.push(tint(c, elementsOf(madeIn(first, Math.min(turns, first + F.at_once), at.matrix, group)), "var(--c)", 0.16, "together"));
  // Draw bands from the blocks to their tile, and the corner in which both have the same k.
  const [ax, ay] = [a.x + (now.a.left + now.a.columns / 2) * a.across, a.y + now.a.top * a.down];
  const [bx, by] = [b.x + now.b.left * b.across, b.y + (now.b.top + now.b.rows / 2) * b.down];
  const [tx, ty] = [c.x + now.c.left * c.across, c.y + now.c.top * c.down];
  parts.push(rect(a.x, ay, tx - a.x, now.a.rows * a.down, { fill: "var(--a)", opacity: 0.1 }));
  parts.push(rect(bx, b.y, now.b.columns * b.across, ty - b.y, { fill: "var(--b)", opacity: 0.12 }));
  parts.push(el("path", { d: `M${ax} ${ay}V${by}H${bx}`, fill: "none", stroke: "var(--soft)", "stroke-dasharray": "2 4" }));
  if (b.x - ax > 60) parts.push(text("same k", (ax + b.x) / 2, by - 5, { "text-anchor": "middle" }));
  parts.push(loaded(a, now.a, "row", turn, step, "var(--a)"), loaded(b, now.b, "column", turn, step, "var(--b)"));
  parts.push(...blockOf(a, now.a, "var(--a)", { id: "block-a" }), ...blockOf(b, now.b, "var(--b)", { id: "block-b" }));
  parts.push(...blockOf(c, now.c, "var(--c)", { id: "tile", "fill-opacity": 0.25 + (0.65 * (step + 1)) / steps, "stroke-width": 2 }));
  live.replaceChildren(...parts);
}

function drawWave(state) {
  const { turn, step, group } = state, { a, b, c } = frames, wave = Math.floor(turn / F.at_once), first = wave * F.at_once;
  const { matrix } = place(first, group), shared = sharing(wave, step, group), parts = [];
  const here = (blocks) => [...blocks.values()].filter((each) => each.matrix === matrix).map(({ block }) => [block.top, block.left, block.rows, block.columns]);
  if (F.parts === 1) parts.push(tint(c, elementsOf(madeIn(0, first, matrix, group)), "var(--c)", 0.4, "done"));
  parts.push(tint(c, elementsOf(madeIn(first, first + shared.turns, matrix, group)), "var(--c)", 0.85, "together"));
  const [rows, columns] = [here(shared.rows), here(shared.columns)];
  parts.push(tint(a, rows.map(([top, , height]) => [top, 0, height, F.k]), "var(--a)", 0.16), tint(b, columns.map(([, left, , width]) => [0, left, F.k, width]), "var(--b)", 0.16));
  for (const [frame, list, key] of [[a, rows, "a"], [b, columns, "b"]]) {
    const path = el("path", { d: frame.path(list), fill: `var(--${key})`, stroke: `var(--${key})`, "stroke-width": 2, id: `wave-${key}` });
    parts.push(path);
  }
  live.replaceChildren(...parts);
}

function drawMove(state) {
  const { turn, step, wave: all, group } = state, { x, out } = frames, at = place(turn, group);
  const first = Math.floor(turn / F.at_once) * F.at_once, parts = [], turn_ = ([top, left, height, width]) => (F.turned ? [left, top, width, height] : [top, left, height, width]);
  const done = elementsOf(madeIn(0, first, at.matrix, group)), together = elementsOf(madeIn(first, Math.min(turns, first + F.at_once), at.matrix, group));
  parts.push(tint(x, done, "var(--a)", 0.4), tint(out, done.map(turn_), "var(--c)", 0.4, "done"));
  parts.push(tint(x, together, "var(--a)", all ? 0.8 : 0.16, "together"), tint(out, together.map(turn_), "var(--c)", all && step ? 0.8 : 0.16, "together-out"));
  if (!all) {
    const { block, again } = moveOf(turn), { top, left, rows, columns } = block, reading = step === 0;
    const areas = [[x, [top, left, rows, columns], "a", reading, "block-x"], [out, turn_([top, left, rows, columns]), "c", !reading, "block-out"]];
    for (const [frame, area, key, now, id] of areas) {
      parts.push(frame.seen(...area, { fill: `var(--${key})`, "fill-opacity": now ? 0.85 : 0.25, stroke: `var(--${key})`, "stroke-width": 2, id, class: now ? "now" : "" }));
      const twice = [[top, left, again[0], columns], [top, left, rows, again[1]]].filter(([, , h, w]) => h && w);
      for (const each of twice) parts.push(frame.box(...(frame === out ? turn_(each) : each), { fill: "url(#picture-mask)", class: "again" }));
    }
    const from = [x.x + (left + columns) * x.across, x.y + (top + rows / 2) * x.down], [oTop, oLeft, oRows] = areas[1][1];
    const to = [out.x + oLeft * out.across, out.y + (oTop + oRows / 2) * out.down], bend = (from[0] + to[0]) / 2;
    parts.push(el("path", { d: `M${from[0]} ${from[1]}C${bend} ${from[1]} ${bend} ${to[1]} ${to[0]} ${to[1]}`, fill: "none", stroke: "var(--soft)", "stroke-dasharray": "2 4" }));
  }
  live.replaceChildren(...parts);
}
