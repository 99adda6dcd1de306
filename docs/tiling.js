"use strict";
// Step through a tiled matrix product C = A B: what each tile loads, what is masked, and the order of tiles.
(() => {
  const root = document.getElementById("tiling");
  if (!root) return;
  const FIELDS = [ // name, label, default, most
    ["m", "M", 4000, 1e6], ["n", "N", 4800, 1e6], ["k", "K", 800, 1e6],
    ["block_m", "BLOCK_M", 128, 1024], ["block_n", "BLOCK_N", 128, 1024], ["block_k", "BLOCK_K", 64, 1024],
    ["group_m", "GROUP_M", 8, 1e6], ["itemsize", "bytes per element", 2, 16], ["at_once", "concurrent programs", 132, 1e5],
  ];
  const COLOR = { a: "#3b82f6", b: "#d98c1f", c: "#1aa37a", masked: "#e0457b" };
  const number = (value) => value.toLocaleString("en-US");
  const bytes = (count) => {
    const units = ["bytes", "KB", "MB", "GB", "TB", "PB", "EB"];
    let unit = 0;
    for (; count >= 1000 && unit < units.length - 1; unit++) count /= 1000;
    return `${number(Math.round(count * 10) / 10)} ${units[unit]}`;
  };
  const span = (first, count) => (count === 1 ? number(first) : `${number(first)} to ${number(first + count - 1)}`);

  // Return the grid of tiles for sizes s, and the total bytes that loads request.
  function cutUp(s) {
    const rows = Math.ceil(s.m / s.block_m), columns = Math.ceil(s.n / s.block_n), steps = Math.ceil(s.k / s.block_k);
    const covered = rows * s.block_m * columns * s.block_n * steps * s.block_k;
    return {
      rows, columns, steps, tiles: rows * columns,
      untiled: 2 * s.m * s.n * s.k * s.itemsize, // a row of A and a column of B for each element of C
      tiled: s.k * (s.m * columns + s.n * rows) * s.itemsize, // A once for each column of tiles, B for each row
      unique: (s.m * s.k + s.k * s.n) * s.itemsize,
      masked: 1 - (s.m * s.n * s.k) / covered,
    };
  }

  // Return [row, column] of a tile. Tiles go column by column through bands of `group` rows of tiles.
  function place(s, index, group = s.group_m) {
    const { rows, columns } = cutUp(s), first = Math.floor(index / (group * columns)) * group;
    const high = Math.min(rows - first, group), within = index % (group * columns);
    return [first + (within % high), Math.floor(within / high)];
  }

  // Return a tile's blocks of A, B and C at a step; `rows` x `columns` of each lie inside its matrix.
  function blocks(s, index, step, group = s.group_m) {
    const [row, column] = place(s, index, group), top = row * s.block_m, left = column * s.block_n, k = step * s.block_k;
    const cut = (top, left, height, width, rows, columns) =>
      ({ top, left, height, width, rows: Math.min(height, rows - top), columns: Math.min(width, columns - left) });
    return {
      a: cut(top, k, s.block_m, s.block_k, s.m, s.k),
      b: cut(k, left, s.block_k, s.block_n, s.k, s.n),
      c: cut(top, left, s.block_m, s.block_n, s.m, s.n),
    };
  }
  const inside = (block) => block.rows * block.columns;

  // Count the distinct blocks of A and of B that a tile and the tiles concurrent with it load in one step.
  function shared(s, index, group = s.group_m) {
    const first = Math.floor(index / s.at_once) * s.at_once, end = Math.min(first + s.at_once, cutUp(s).tiles);
    const rows = new Set(), columns = new Set();
    for (let i = first; i < end; i++) {
      const [row, column] = place(s, i, group);
      rows.add(row);
      columns.add(column);
    }
    return { loads: 2 * (end - first), a: rows.size, b: columns.size };
  }

  // The page: a form, two sliders, a drawing and facts.
  root.innerHTML = `
    <style>
      #tiling form { display: grid; grid-template-columns: repeat(auto-fill, minmax(7.5rem, 1fr)); gap: .5rem; font-size: .75rem }
      #tiling input { font: inherit; color: inherit; width: 100%; box-sizing: border-box }
      #tiling input[type=number] { border: 1px solid #8888; border-radius: 4px; padding: .2rem .4rem; background: none }
      #tiling input:invalid { border-color: ${COLOR.masked} }
      #tiling .go { display: grid; grid-template-columns: auto auto 1fr auto; gap: .4rem .6rem; align-items: center; margin: .8rem 0 }
      #tiling button { font: inherit; color: inherit; border: 1px solid #8888; border-radius: 4px; padding: .1rem .7rem; background: none }
      #tiling svg { width: 100%; height: auto; display: block } #tiling text { fill: currentColor; font-size: 13px }
      #tiling dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: .4rem 1rem }
      #tiling dt { opacity: .75; font-size: .7rem } #tiling dd { margin: 0; font-weight: bold }
    </style>
    <form>${FIELDS.map(([name, label, value, most]) =>
      `<label>${label}<input type="number" name="${name}" value="${value}" min="1" max="${most}" step="1" required></label>`).join("")}</form>
    <div class="go">${["tile", "step"].map((name) =>
      `<span>${name}</span><button type="button" data-back="${name}" aria-label="previous ${name}">‹</button>
       <input type="range" id="tiling-${name}" min="0" value="0" aria-label="${name}">
       <button type="button" data-on="${name}" aria-label="next ${name}">›</button>`).join("")}</div>
    <p role="status"></p><svg role="img" aria-label="Blocks of A, B and C"></svg><dl></dl>`;
  const form = root.querySelector("form"), svg = root.querySelector("svg"), status = root.querySelector("[role=status]");
  const slider = { tile: root.querySelector("#tiling-tile"), step: root.querySelector("#tiling-step") };
  const sizes = () => Object.fromEntries(FIELDS.map(([name]) => [name, Number(form.elements[name].value)]));

  function rect(x, y, width, height, style) {
    return width > 0 && height > 0 ? `<rect x="${x}" y="${y}" width="${width}" height="${height}" ${style}/>` : "";
  }

  function draw(s, p, index, step) {
    const wide = Math.max(320, Math.min(720, svg.clientWidth || 720)), gap = 40, room = wide - gap, sides = [p.rows * s.block_m, p.columns * s.block_n, p.steps * s.block_k];
    const [m, n, k] = sides.map((side) => Math.max(side, Math.max(...sides) / 7)); // wide enough to see
    const scale = Math.min(room / (k + n), 480 / (k + m));
    const down = (m * scale) / sides[0], across = (n * scale) / sides[1], along = (k * scale) / sides[2];
    const x = k * scale + gap, y = 24 + k * scale + gap, now = blocks(s, index, step);
    const frames = [
      ["a", 0, y, down, along, s.m, s.k, s.block_m, s.block_k], ["b", x, 24, along, across, s.k, s.n, s.block_k, s.block_n],
      ["c", x, y, down, across, s.m, s.n, s.block_m, s.block_n],
    ];
    const labels = frames.map(([name, left, , , , rows, columns]) => {
      const text = `${name.toUpperCase()} ${number(rows)} × ${number(columns)}`, room = 8 * text.length; // and some to spare
      return { text, room, left: Math.max(0, Math.min(left, wide - room)) };
    });
    const lift = labels[0].room > labels[2].left ? 16 : 0; // of A's label above C's
    let made = "";
    for (const [i, [name, left, top, tall, broad, rows, columns, height, width]] of frames.entries()) {
      const part = (r, c, h, w, style) => rect(left + c * broad, top + r * tall, w * broad, h * tall, style);
      const fill = `fill="${COLOR[name]}"`, block = now[name], hatched = `fill="url(#tiling-masked)" class="masked"`;
      made += `<text x="${labels[i].left}" y="${top - 8 - (name === "a" ? lift : 0)}">${labels[i].text}</text>`;
      made += part(0, 0, rows, columns, `fill="none" stroke="currentColor"`);
      let lines = "";
      if (height * tall >= 4) for (let r = height; r < rows; r += height) lines += `M${left} ${top + r * tall}h${columns * broad}`;
      if (width * broad >= 4) for (let c = width; c < columns; c += width) lines += `M${left + c * broad} ${top}v${rows * tall}`;
      made += `<path d="${lines}" stroke="currentColor" opacity=".2"/>`;
      if (name === "a") made += part(block.top, 0, block.rows, block.left, `${fill} opacity=".3"`); // already loaded
      if (name === "b") made += part(0, block.left, block.top, block.columns, `${fill} opacity=".3"`);
      if (name === "c") { // tiles already computed: whole bands, then whole columns of this band, then part of a column
        const first = Math.floor(index / (s.group_m * p.columns)) * s.group_m, within = index % (s.group_m * p.columns);
        const high = Math.min(p.rows - first, s.group_m), whole = Math.floor(within / high);
        for (const [r, c, h, w] of [[0, 0, first, p.columns], [first, 0, high, whole], [first, whole, within % high, 1]])
          made += part(r * height, c * width, h && Math.min(h * height, rows - r * height), w && Math.min(w * width, columns - c * width), `${fill} opacity=".3"`);
      }
      made += part(block.top, block.left, block.rows, block.columns, fill);
      made += part(block.top + block.rows, block.left, block.height - block.rows, block.width, hatched);
      made += part(block.top, block.left + block.columns, block.rows, block.width - block.columns, hatched);
    }
    svg.setAttribute("viewBox", `-2 0 ${wide + 4} ${Math.ceil(y + m * scale + 4)}`);
    svg.innerHTML = `<defs><pattern id="tiling-masked" width="7" height="7" patternUnits="userSpaceOnUse"><path d="M0 7L7 0" stroke="${COLOR.masked}" stroke-width="1.6"/></pattern></defs>${made}`;
  }

  function show() {
    if (!form.checkValidity()) {
      status.textContent = "Each field takes a whole number of at least 1.";
      return;
    }
    const s = sizes(), p = cutUp(s);
    slider.tile.max = p.tiles - 1;
    slider.step.max = p.steps - 1;
    const index = Number(slider.tile.value), step = Number(slider.step.value), now = blocks(s, index, step);
    const [row, column] = place(s, index), loaded = inside(now.a) + inside(now.b), requested = s.block_k * (s.block_m + s.block_n);
    const wave = shared(s, index), plain = shared(s, index, 1), done = Math.min(s.k, (step + 1) * s.block_k);
    const soFar = (now.c.rows + now.c.columns) * done * s.itemsize, soFarUntiled = 2 * inside(now.c) * done * s.itemsize;
    draw(s, p, index, step);
    status.textContent = `Tile ${number(index)} (0 to ${number(p.tiles - 1)}): row ${number(row)}, column ${number(column)}. ` +
      `Step ${number(step + 1)} of ${number(p.steps)} loads k = ${span(now.a.left, now.a.columns)}.` +
      (loaded < requested ? " Hatched: past the edge, so zero-filled in A and B and not stored in C." : "");
    const facts = [
      ["tiles", "Tiles", p.tiles, number], ["steps", "K iterations per tile", p.steps, number],
      ["untiled", "Requested without tiles", p.untiled, bytes], ["tiled", "Requested with these tiles", p.tiled, bytes],
      ["unique", "A and B, each read once", p.unique, bytes], ["masked", "Multiply-adds past an edge", p.masked, (share) => `${(100 * share).toFixed(1)}%`],
      ["loaded", "This step loads", loaded * s.itemsize, bytes], ["filled", "Zero-filled in this step", 1 - loaded / requested, (share) => `${Math.floor(100 * share)}%`],
      ["so_far", "Loaded for this tile so far", soFar, bytes], ["so_far_untiled", "Without tiles it would be", soFarUntiled, bytes],
      ["wave", `Blocks loaded by ${number(wave.loads / 2)} concurrent programs`, wave.loads, number],
      ["different", "Distinct blocks among them", wave.a + wave.b, (count) => `${number(count)}: ${number(wave.a)} of A, ${number(wave.b)} of B`],
      ["plain", "Distinct blocks with GROUP_M = 1", plain.a + plain.b, (count) => `${number(count)}: ${number(plain.a)} of A, ${number(plain.b)} of B`],
    ];
    root.querySelector("dl").innerHTML = facts.map(([name, label, value, write]) =>
      `<div><dt>${label}</dt><dd data-fact="${name}" data-value="${value}">${write(value)}</dd></div>`).join("");
  }

  // Go forward or back by one. After a tile's last step comes the first step of the next tile.
  function go(name, by) {
    const before = slider[name].value;
    slider[name].value = Number(before) + by;
    if (name === "step" && slider.step.value === before) {
      const tile = slider.tile.value;
      slider.tile.value = Number(tile) + by;
      if (slider.tile.value !== tile) slider.step.value = by > 0 ? 0 : slider.step.max;
    }
    show();
  }
  form.addEventListener("input", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  Object.values(slider).forEach((each) => each.addEventListener("input", show));
  root.querySelectorAll("button").forEach((button) =>
    button.addEventListener("click", () => (button.dataset.on ? go(button.dataset.on, 1) : go(button.dataset.back, -1))));
  window.addEventListener("resize", show);
  window.tiling = { cutUp, place, blocks, shared, sizes };
  show();
})();
