// Describe a step in texts and numbers, and draw its blocks close up.
const UNITS = ["bytes", "KB", "MB", "GB", "TB", "PB", "EB"];
function bytes(count) {
  let unit = 0;
  while (count >= 1000 && unit < UNITS.length - 1) (count /= 1000), unit++;
  return `${number(Math.floor(count * 10 + 0.5) / 10)} ${UNITS[unit]}`;
}
const times = (ratio) => number(ratio < 10 ? Math.round(ratio * 10) / 10 : Math.round(ratio));
// Rounded down, so that only all is 100%; 1e-9 covers rounding errors.
const percent = (share) => `${Math.floor(share * 1000 + 1e-9) / 10}%`;
const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
const span = (first, count) => (count === 1 ? number(first) : `${number(first)} to ${number(first + count - 1)}`);
const by = (block) => `${block.height} × ${block.width}`;
const matrixWords = (matrix) => (F.matrices > 1 ? `, matrix ${number(matrix)}` : "");

function list(rows) {
  const made = [];
  for (const [name, value, more] of rows.filter(Boolean)) {
    const dt = document.createElement("dt"), dd = document.createElement("dd");
    dt.textContent = name;
    dd.textContent = value;
    dd.dataset.fact = name;
    if (more) dd.append(Object.assign(document.createElement("small"), { textContent: more }));
    made.push(dt, dd);
  }
  document.getElementById("facts-list").replaceChildren(...made);
}

function compare(title, good, bad, shown = bytes) {
  const made = [Object.assign(document.createElement("h2"), { textContent: title })];
  for (const [words, value, worse] of [[...good, false], [...bad, true]]) {
    const line = document.createElement("p"), track = document.createElement("div"), bar = document.createElement("i");
    line.append(words, Object.assign(document.createElement("b"), { textContent: shown(value) }));
    track.className = "track";
    bar.className = worse ? "worse" : "";
    bar.style.width = `${(100 * value) / Math.max(good[1], bad[1])}%`;
    track.append(bar);
    made.push(line, track);
  }
  document.getElementById("compare").replaceChildren(...made);
}

function say(...parts) {
  const made = parts.map((part) => (typeof part === "string" ? part : Object.assign(document.createElement("b"), { className: part[0], textContent: part[1] })));
  document.getElementById("saying").replaceChildren(...made);
}

function maskWords({ a, b }) {
  const rows = a.height - a.rows, columns = b.width - b.columns, depth = a.width - a.columns;
  const parts = [[rows, "rows of A"], [columns, "columns of B"], [depth, "of K"]].filter(([count]) => count > 0);
  return parts.map(([count, what]) => `${count} ${count === 1 ? what.replace("rows", "row").replace("columns", "column") : what}`).join(", ");
}

function tellTurn({ turn, step, group }) {
  const at = place(turn, group), now = stepOf(turn, step, group), steps = stepsOf(turn), program = programOf(turn), { a, b, c } = now;
  const own = Math.ceil((turns - program) / F.programs), masks = maskWords(now), last = step === steps - 1;
  say(`Program ${number(program)} makes the `, ["c", `tile of C in row ${number(at.row)}, column ${number(at.column)}`], `${matrixWords(at.matrix)}. At step ${number(step + 1)} of ${number(steps)} it loads `,
    ["a", `${by(a)} of A`], " and ", ["b", `${by(b)} of B`], ", multiplies them and adds the product to its tile. ",
    masks ? `Past the edge lie ${masks}: zero-filled. ` : "", last ? (F.parts > 1 ? "Its part of the sum is complete." : "The tile is complete: it is stored.") : "");
  list([
    ["Program", number(program), own > 1 ? `its tile ${number(Math.floor(turn / F.programs) + 1)} of ${number(own)}` : F.parts > 1 ? `part ${partOf(turn) + 1} of ${F.parts} of its tile` : `of 0 to ${number(F.programs - 1)}`],
    ["Tile (row, column)", `(${number(at.row)}, ${number(at.column)})`, F.matrices > 1 ? `of matrix ${number(at.matrix)}` : ""],
    ["Rows of C", span(c.top, c.rows)],
    ["Columns of C", span(c.left, c.columns)],
    ["Step of K", `${number(step + 1)} of ${number(steps)}`, `k = ${span(a.left, a.columns)}`],
    ["Loaded now", bytes(now.bytes)],
    ["Zero-filled now", percent(now.masked), masks],
  ]);
  compare("Bytes so far, for this tile", ["with tiles", now.soFar], [`element by element: ${times(now.untiled / now.soFar)} times as many`, now.untiled]);
  closeProduct(now, last);
}

function tellWave({ turn, step, group }) {
  const wave = Math.floor(turn / F.at_once), shared = sharing(wave, step, group), plain = sharing(wave, step, group === 1 ? F.group : 1);
  const different = shared.a + shared.b, hits = shared.loads - different, other = group === 1 ? F.orders : F.plain[0].toUpperCase() + F.plain.slice(1);
  say(`${shared.turns === 1 ? "1 program runs at a time. At this step it loads" : `${number(shared.turns)} programs run at the same time. At this step they load`} ${counted(shared.loads, "block")}, yet only `,
    ["a", `${number(shared.a)} different ${shared.a === 1 ? "one" : "ones"} of A`], " and ", ["b", `${number(shared.b)} of B`],
    `: programs of one row of tiles want the same block of A, those of one column the same of B. The first to ask brings it from memory; the others find it in the L2 cache.`);
  list([
    ["Wave", `${number(wave + 1)} of ${number(waves)}`],
    ["Programs at once", number(shared.turns), `${F.processors} SMs, room for ${F.resident} on each`],
    ["Step", `${number(step + 1)} of ${number(stepsOf(wave * F.at_once))}`],
    ["Blocks loaded", number(shared.loads), bytes(shared.bytes)],
    ["Different blocks", number(different), `${number(shared.a)} of A, ${number(shared.b)} of B: ${bytes(shared.once)}`],
    ["Found in L2", `${number(hits)} of ${number(shared.loads)}`, percent(hits / shared.loads)],
    F.orders ? [`${other} instead`, number(plain.a + plain.b), `${number(plain.a)} of A, ${number(plain.b)} of B: ${bytes(plain.once)}`] : null,
  ]);
  compare("Bytes of this step, for the wave", ["from memory", shared.once], ["asked for by programs", shared.bytes]);
  closeProduct(stepOf(wave * F.at_once, step, group), false);
}

function tellMove({ turn, step, wave: all, group }) {
  const at = place(turn, group), move = moveOf(turn), { block, again } = move, program = programOf(turn), wave = Math.floor(turn / F.at_once);
  const size = `${block.rows} × ${block.columns}`, spare = block.rows < block.height || block.columns < block.width;
  const twice = [again[0] && `its first ${again[0] === 1 ? "row" : counted(again[0], "row")}`, again[1] && `its first ${again[1] === 1 ? "column" : counted(again[1], "column")}`].filter(Boolean).join(" and ");
  const together = Math.min(turns, (wave + 1) * F.at_once) - wave * F.at_once;
  if (all) say(`${together === 1 ? "1 program runs at a time, with a tile of its own" : `${number(together)} programs run at the same time, each with a tile of its own`}: `, ["a", "read along rows of x"], ", ", ["c", F.turned ? "written along rows of out" : "written in the order of out"], ". Tiles that lie side by side share the sectors at their edges, which L2 then puts together.");
  else if (step === 0) say(`Program ${number(program)} reads `, ["a", `a tile of ${size} of x`], `${matrixWords(at.matrix)}, row by row: elements that lie side by side come in the same sectors of 32 bytes.`, twice ? ` Tiles beside it also move ${twice}, with the same values${spare ? "" : ", so no tile needs masks"}.` : "");
  else say(`Program ${number(program)} ${F.turned ? "turns the tile over inside the SM and" : ""} writes it to `, ["c", F.turned ? `${block.columns} × ${block.rows} of out` : `${size} of out`], `, row by row of out. Written straight from rows of x, the same elements would touch ${counted(move.untiled, "sector")} in place of ${number(move.written)}.`);
  list([
    [all ? "First program" : "Program", number(program), all ? `wave ${number(wave + 1)} of ${number(waves)}` : `of 0 to ${number(F.programs - 1)}`],
    ["Tile (row, column)", `(${number(at.row)}, ${number(at.column)})`, F.matrices > 1 ? `of matrix ${number(at.matrix)}` : ""],
    ["Rows of x", span(block.top, block.rows), F.lanes > 1 ? "each column from where out has a word's start" : ""],
    ["Columns of x", span(block.left, block.columns)],
    ["Step", `${step + 1} of 2`, step ? "write" : "read"],
    ["Moved", bytes(move.bytes)],
    ["Sectors read", number(move.read)],
    ["Sectors written", number(move.written), `${number(Math.ceil(move.bytes / SECTOR))} if each were full`],
    twice ? ["Moved twice", twice] : null,
    spare ? ["Left idle", percent(1 - inside(block) / whole(block)), `of a block of ${by(block)}`] : null,
  ]);
  compare("Sectors written, for this tile", ["tile by tile", move.written], [`row by row of x: ${times(move.untiled / move.written)} times as many`, move.untiled], number);
  closeMove(at.matrix, move, step);
}

function closeLabel(words, x, y, width, height, style) {
  if (width >= 66 && height >= 14) return [text(words, x + width / 2, y + height / 2 + 4, { "text-anchor": "middle", style })];
  if (height >= 66 && width >= 14) return [text(words, 0, 0, { transform: `translate(${x + width / 2 + 4} ${y + height / 2}) rotate(-90)`, "text-anchor": "middle", style })];
  return [];
}

function closeBlock(block, x, y, down, across, key, words) {
  const { height, width, rows, columns } = block, masked = { fill: "url(#close-mask)", stroke: "var(--mask)", class: "masked" }, ink = "fill: var(--ink); font-weight: 600; paint-order: stroke; stroke: var(--card); stroke-width: 4px";
  const made = [rect(x, y, columns * across, rows * down, { fill: `var(--${key})`, "fill-opacity": 0.3, stroke: `var(--${key})`, "stroke-width": 1.5 })];
  if (rows < height) made.push(rect(x, y + rows * down, width * across, (height - rows) * down, masked), ...closeLabel(words, x, y + rows * down, width * across, (height - rows) * down, ink));
  if (columns < width) made.push(rect(x + columns * across, y, (width - columns) * across, rows * down, masked), ...closeLabel(words, x + columns * across, y, (width - columns) * across, rows * down, ink));
  return made;
}

function closeProduct({ a, b, c }, last) {
  document.getElementById("close-name").textContent = "Blocks of this step, close up";
  const width = Math.max(220, close_.clientWidth || 320), [m, n, k] = least([c.height, c.width, a.width]), gap = 30, top = 22;
  const scale = Math.min((width - gap - 6) / (k + n), (280 - gap) / (k + m)), x = 3 + (width - 6 - gap - (k + n) * scale) / 2;
  const [down, across, depth] = [(m * scale) / c.height, (n * scale) / c.width, (k * scale) / a.width], cx = x + k * scale + gap, cy = top + k * scale + gap;
  begin(close_, width, cy + m * scale + 6);
  const note = (name, key, block, left, above) => text(`${name} ${by(block)}`, left, above - 6, { style: `fill: var(--${key}-ink, var(--${key})); font-weight: 600` });
  close_.append(...closeBlock(a, x, cy, down, depth, "a", "zero-filled"), ...closeBlock(b, cx, top, depth, across, "b", "zero-filled"), ...closeBlock(c, cx, cy, down, across, "c", "not stored"));
  close_.append(note("A", "a", a, x, cy), note("B", "b", b, cx, top), note("C", "c", c, cx, cy));
}

// Draw 32-byte sectors as cells, and in each the part that a row of elements touches.
function sectorsOf(which, matrix, pairs) {
  const found = new Map();
  for (const [m, n] of pairs) {
    const at = byteOf(which, matrix, m, n), sector = Math.floor(at / SECTOR);
    if (!found.has(sector)) found.set(sector, []);
    found.get(sector).push(at - sector * SECTOR);
  }
  return [...found.values()];
}

function closeMove(matrix, { block }, step) {
  const width = Math.max(220, close_.clientWidth || 320), cell = 56, room = Math.max(3, Math.floor((width - 14) / cell)), { top, left, rows, columns } = block;
  const count = 5, across = (i) => Array.from({ length: Math.min(columns, 512) }, (_, j) => [top + F.lanes - 1 + i, left + j]);
  const along = (j) => Array.from({ length: Math.min(rows, 512) }, (_, i) => [top + i + startOf(matrix, left + j), left + j]);
  const kept = (make, limit) => Array.from({ length: Math.min(count, limit) }, (_, i) => make(i));
  const groups = step === 0 ? [["read: first rows of the tile in x", "x", kept(across, rows), "a"]] : [
    ["written: first rows of the tile in out", "out", F.turned ? kept(along, columns) : kept(across, rows), "c"],
    ["without tiles: one row of x, into out", "out", across(0).slice(0, count).map((pair) => [pair]), "mask"]];
  document.getElementById("close-name").textContent = "Memory close up, in sectors of 32 bytes";
  const line = 17, height = groups.reduce((sum, [, , list]) => sum + 26 + list.length * line, 4), made = [];
  begin(close_, width, height);
  let y = 14;
  for (const [words, which, list, key] of groups) {
    made.push(text(words, 3, y, { style: `fill: var(--${key}-ink, var(--${key})); font-weight: 600` }));
    for (const [i, pairs] of list.entries()) {
      const sectors = sectorsOf(which, matrix, pairs), above = y + 7 + i * line, unit = (cell - 3) / SECTOR;
      for (const [j, starts] of sectors.slice(0, room).entries()) {
        const x = 3 + j * cell, ordered = starts.sort((p, q) => p - q);
        made.push(rect(x, above, cell - 3, line - 4, { fill: "var(--grid)", rx: 2 }));
        made.push(el("path", { d: ordered.map((at) => `M${x + at * unit} ${above}h${F.itemsize * unit}v${line - 4}h${-F.itemsize * unit}z`).join(""), fill: `var(--${key})`, opacity: 0.8 }));
      }
      if (sectors.length > room) made.push(text("…", 3 + room * cell, above + 10));
    }
    y += 26 + list.length * line;
  }
  close_.append(...made);
}
