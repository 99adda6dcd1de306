"use strict";
// Compute what the kernels do from the numbers in the page, as tritile/lab/report/tiling does in Python.
const F = JSON.parse(document.getElementById("facts").textContent);
const SECTOR = 32;
const perMatrix = F.rows * F.columns, tiles = perMatrix * F.matrices, turns = tiles * F.parts;
const waves = Math.ceil(turns / F.at_once);
const product = F.op === "matmul";

// Return the tile of a turn: matrix after matrix, in each down bands of `group` tile rows, column by column.
// Where F.by_columns, bands are of tile columns, and in each tiles go row by row.
const [bandedRows, bandedColumns] = F.by_columns ? [F.columns, F.rows] : [F.rows, F.columns];
function place(turn, group = F.group) {
  const index = turn % tiles, matrix = Math.floor(index / perMatrix), here = index % perMatrix;
  const first = Math.floor(here / (group * bandedColumns)) * group, within = here % (group * bandedColumns);
  const high = Math.min(bandedRows - first, group), row = first + (within % high), column = Math.floor(within / high);
  return F.by_columns ? { matrix, row: column, column: row } : { matrix, row, column };
}

// Return the turn of a tile of the first part: the inverse of `place`.
function turnAt(matrix, row, column, group = F.group) {
  if (F.by_columns) [row, column] = [column, row];
  const first = Math.floor(row / group) * group, high = Math.min(bandedRows - first, group);
  return matrix * perMatrix + first * bandedColumns + column * high + row - first;
}

// Cover the first `count` tiles of a matrix by at most three rectangles: [row, column, rows, columns].
function prefix(count, group) {
  const first = Math.floor(count / (group * bandedColumns)) * group, within = count % (group * bandedColumns);
  const high = Math.min(bandedRows - first, group), whole = high > 0 ? Math.floor(within / high) : 0;
  const all = [[0, 0, Math.min(first, bandedRows), bandedColumns], [first, 0, high, whole], [first, whole, within - whole * high, 1]];
  const found = all.filter(([, , rows, columns]) => rows > 0 && columns > 0);
  return F.by_columns ? found.map(([row, column, rows, columns]) => [column, row, columns, rows]) : found;
}

// Return the tiles of a matrix that turns `from` to `to` make, as rectangles that cancel where two overlap.
function madeIn(from, to, matrix, group) {
  const first = matrix * perMatrix, start = from % tiles, end = start + Math.min(to - from, tiles);
  const ranges = end <= tiles ? [[start, end]] : [[start, tiles], [0, end - tiles]];
  const clip = (index) => Math.max(0, Math.min(perMatrix, index - first));
  return ranges.flatMap(([a, b]) => (clip(a) < clip(b) ? [...prefix(clip(b), group), ...prefix(clip(a), group)] : []));
}

const partOf = (turn) => Math.floor(turn / tiles);
const programOf = (turn) => turn % F.programs;

// Return the blocks of K of a turn: the first, the step to the next, and how many. F.ranges: a range for each part.
function blocksOf(turn) {
  const part = partOf(turn), beginOf = (index) => Math.floor((index * F.blocks) / F.parts);
  if (F.ranges) return [beginOf(part), 1, beginOf(part + 1) - beginOf(part)];
  return [part, F.parts, Math.ceil((F.blocks - part) / F.parts)];
}
const stepsOf = (turn) => (product ? blocksOf(turn)[2] : 2);
function depthAt(turn, step) {
  const [first, stride] = blocksOf(turn);
  return (first + step * stride) * F.block_k;
}

function cut(top, left, height, width, rows, columns) {
  return { top, left, height, width, rows: Math.min(height, rows - top), columns: Math.min(width, columns - left) };
}
const inside = (block) => block.rows * block.columns;
const whole = (block) => block.height * block.width;

// Return a step of a product: its blocks of A, B and C, and bytes.
function stepOf(turn, step, group = F.group) {
  const { row, column } = place(turn, group), [height, width] = F.covers, depth = F.block_k;
  const k = depthAt(turn, step);
  const a = cut(row * height, k, height, depth, F.m, F.k), b = cut(k, column * width, depth, width, F.k, F.n);
  const c = cut(row * height, column * width, height, width, F.m, F.n), done = step * depth + a.columns;
  return {
    a, b, c, done,
    bytes: (inside(a) + inside(b)) * F.itemsize,
    soFar: (c.rows + c.columns) * done * F.itemsize,
    untiled: 2 * inside(c) * done * F.itemsize,
    masked: 1 - (inside(a) + inside(b)) / (whole(a) + whole(b)),
  };
}

// Return what the programs of a wave load at one step: in all, and with each block counted once.
function sharing(wave, step, group = F.group) {
  const a = new Map(), b = new Map(), end = Math.min(turns, (wave + 1) * F.at_once);
  const found = { turns: end - wave * F.at_once, loads: 0, bytes: 0, once: 0, a: 0, b: 0, rows: new Map(), columns: new Map() };
  for (let turn = wave * F.at_once; turn < end; turn++) {
    if (step >= stepsOf(turn)) continue;
    const at = place(turn, group), now = stepOf(turn, step, group), size = [inside(now.a) * F.itemsize, inside(now.b) * F.itemsize];
    a.set(`${at.matrix} ${partOf(turn)} ${at.row}`, size[0]);
    b.set(`${at.matrix} ${partOf(turn)} ${at.column}`, size[1]);
    found.rows.set(`${at.matrix} ${now.a.left} ${now.a.top}`, { matrix: at.matrix, block: now.a });
    found.columns.set(`${at.matrix} ${now.b.top} ${now.b.left}`, { matrix: at.matrix, block: now.b });
    found.loads += 2;
    found.bytes += size[0] + size[1];
  }
  for (const size of [...a.values(), ...b.values()]) found.once += size;
  return Object.assign(found, { a: a.size, b: b.size });
}

// Return the offset, in elements, of an index into dimensions given innermost first.
function offset([sizes, x, out], which, index) {
  const strides = which === "x" ? x : out;
  let found = 0;
  sizes.forEach((size, i) => {
    found += (i === sizes.length - 1 ? index : index % size) * strides[i];
    index = Math.floor(index / size);
  });
  return found;
}

// Return the byte at which element (m, n) of a matrix of x or of out starts.
const byteOf = (which, matrix, m, n) =>
  F.itemsize * (offset(F.dims.m, which, m) + offset(F.dims.n, which, n) + offset(F.dims.batch, which, matrix));

// Return the row at which the first whole word of a column of out starts.
const startOf = (matrix, n) =>
  F.lanes === 1 ? 0 : (F.lanes - ((byteOf("out", matrix, 0, n) / F.itemsize) % F.lanes)) % F.lanes;

function distinct(list) {
  list.sort();
  let count = 0;
  for (let i = 0; i < list.length; i++) count += i === 0 || list[i] !== list[i - 1];
  return count;
}

// Return what a turn of a permutation moves, and the 32-byte sectors that it touches.
let last = null;
function moveOf(turn) {
  if (last?.turn === turn) return last;
  const { matrix, row, column } = place(turn), [height, width] = F.covers;
  const top = Math.min(row * height, F.whole - height), left = Math.min(column * width, F.n - width);
  const starts = Array.from({ length: width }, (_, j) => startOf(matrix, left + j));
  let untiled = 0;
  const sectors = (which) => {
    const found = new Float64Array(height * width), base = byteOf(which, matrix, 0, 0);
    const rows = Array.from({ length: height + F.lanes - 1 }, (_, i) => F.itemsize * offset(F.dims.m, which, top + i));
    const columns = starts.map((_, j) => base + F.itemsize * offset(F.dims.n, which, left + j));
    for (let i = 0; i < height; i++) {
      for (let j = 0; j < width; j++) found[i * width + j] = Math.floor((rows[i + starts[j]] + columns[j]) / SECTOR);
      if (which === "out") untiled += distinct(found.slice(i * width, (i + 1) * width));
    }
    return distinct(found);
  };
  const read = sectors("x"), written = sectors("out");
  return last = {
    turn,
    block: { top, left, height: F.block_m, width: F.block_n, rows: height, columns: width },
    again: [row * height - top, column * width - left],
    ends: F.lanes > 1 && row === 0,
    bytes: height * width * F.itemsize,
    read, written, untiled,
  };
}
