// Hold what is shown now, and handle the controls that change it.
const $ = (id) => document.getElementById(id);
const state = { turn: 0, step: 0, wave: false, group: F.group };
let timer = null;

function show() {
  if (product) (state.wave ? drawWave : drawTurn)(state);
  else drawMove(state);
  (product ? (state.wave ? tellWave : tellTurn) : tellMove)(state);
  const steps = stepsOf(state.turn), wave = Math.floor(state.turn / F.at_once);
  $("step").max = steps;
  $("step").value = state.step + 1;
  $("step-of").value = `${number(state.step + 1)} of ${number(steps)}`;
  $("turn").max = state.wave ? waves - 1 : turns - 1;
  $("turn").value = state.wave ? wave : state.turn;
  $("turn-name").textContent = state.wave ? "Wave" : F.turn_name;
  $("turn-of").value = state.wave ? `${number(wave + 1)} of ${number(waves)}` : `${number(state.turn)} (0 to ${number(turns - 1)})`;
  document.querySelectorAll(".unit").forEach((unit) => (unit.textContent = state.wave ? "wave" : F.turn_name.toLowerCase()));
  $("one").setAttribute("aria-pressed", !state.wave);
  $("all").setAttribute("aria-pressed", state.wave);
  if ($("orders")) {
    $("orders").hidden = !state.wave;
    $("banded").setAttribute("aria-pressed", state.group === F.group);
    $("plain").setAttribute("aria-pressed", state.group !== F.group);
  }
}

function go(turn, step) {
  state.turn = Math.max(0, Math.min(turns - 1, turn));
  state.step = Math.max(0, Math.min(stepsOf(state.turn) - 1, step));
  show();
}

// Go to the next step; after a tile's last one to the program's next tile, then to the next program.
function forward() {
  const { turn, step } = state;
  if (step < stepsOf(turn) - 1) return go(turn, step + 1), true;
  const unit = state.wave ? F.at_once : F.programs, first = Math.floor(turn / F.at_once) * F.at_once;
  const next = state.wave ? first + unit : turn + unit < turns ? turn + unit : (turn % unit) + 1;
  if (state.wave ? next >= turns : turn + unit >= turns && next >= unit) return false;
  return go(next, 0), true;
}

function back() {
  const { turn, step } = state;
  if (step > 0) return go(turn, step - 1);
  if (state.wave) return turn >= F.at_once ? go(Math.floor(turn / F.at_once) * F.at_once - F.at_once, Infinity) : undefined;
  if (turn >= F.programs) return go(turn - F.programs, Infinity);
  if (turn > 0) go(turn - 1 + Math.floor((turns - turn) / F.programs) * F.programs, Infinity);
}

const jump = (by) => (state.wave ? go((Math.floor(state.turn / F.at_once) + by) * F.at_once, state.step) : go(state.turn + by, state.step));

function pause() {
  clearTimeout(timer);
  timer = null;
  $("play").textContent = "Play";
  $("saying").setAttribute("aria-live", "polite");
}

function play() {
  $("play").textContent = "Pause";
  $("saying").setAttribute("aria-live", "off");
  const tick = () => (forward() ? (timer = setTimeout(tick, 1000 / $("speed").value)) : pause());
  timer = setTimeout(tick, 1000 / $("speed").value);
}

const choose = (change) => () => (pause(), change());
function setMode(wave) {
  state.wave = wave;
  legend();
  state.group = F.group;
  go(wave ? Math.floor(state.turn / F.at_once) * F.at_once : state.turn, state.step);
}

$("play").addEventListener("click", () => (timer === null ? play() : pause()));
$("forward").addEventListener("click", choose(forward));
$("back").addEventListener("click", choose(back));
$("next").addEventListener("click", choose(() => jump(1)));
$("previous").addEventListener("click", choose(() => jump(-1)));
$("one").addEventListener("click", choose(() => setMode(false)));
$("all").addEventListener("click", choose(() => setMode(true)));
$("step").addEventListener("input", choose(() => go(state.turn, $("step").value - 1)));
$("turn").addEventListener("input", choose(() => go(state.wave ? $("turn").value * F.at_once : Number($("turn").value), state.step)));
if ($("orders")) {
  $("banded").addEventListener("click", choose(() => ((state.group = F.group), show())));
  $("plain").addEventListener("click", choose(() => ((state.group = 1), show())));
}

const KEYS = {
  ArrowRight: choose(forward), ArrowLeft: choose(back), ArrowDown: choose(() => jump(1)), ArrowUp: choose(() => jump(-1)),
  Home: choose(() => go(state.turn, 0)), End: choose(() => go(state.turn, Infinity)),
  " ": () => (timer === null ? play() : pause()), w: choose(() => setMode(!state.wave)),
};
document.addEventListener("keydown", (event) => {
  const own = event.target.closest("input, select") || (event.key === " " && event.target.closest("button"));
  if (own || event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key]();
});

// Go to the tile that is clicked in C, x or out.
picture.addEventListener("click", (event) => {
  const at = picture.getBoundingClientRect(), x = event.clientX - at.left, y = event.clientY - at.top;
  for (const [key, frame] of Object.entries(frames)) {
    let [m, n] = [(y - frame.y) / frame.down, (x - frame.x) / frame.across];
    if (key === "a" || key === "b" || m < 0 || n < 0 || m >= frame.rows || n >= frame.columns) continue;
    if (key === "out" && F.turned) [m, n] = [n, m];
    const row = Math.min(F.rows - 1, Math.floor(m / F.covers[0])), column = Math.min(F.columns - 1, Math.floor(n / F.covers[1]));
    pause();
    const turn = turnAt(place(state.turn).matrix, row, column, state.group);
    go(state.wave ? Math.floor(turn / F.at_once) * F.at_once : turn, state.step);
  }
});

const ragged = F.m % F.covers[0] || F.n % F.covers[1] || (product && F.k % F.block_k);
const SAMPLES = () => product ? (state.wave
  ? [["c", 0.9, "made at the same time"], ["c", 0.4, "made before"], ["a", 1, "blocks of A now, each for several programs"], ["b", 1, "blocks of B now"], ["ab", 0.2, "what these programs need in all"]]
  : [["c", 0.9, "its tile of C"], ["c", 0.16, "made at the same time"], ["c", 0.4, "made before"], ["a", 1, "block of A now"], ["b", 1, "block of B now"], ["ab", 0.35, "loaded already"], ...(ragged ? [["", 1, "past the edge: zero-filled"]] : [])])
  : [["a", 0.9, "read"], ["c", 0.9, "written"], ...(state.wave ? [] : [["ac", 0.16, "moved at the same time"]]), ["ac", 0.4, "moved before"], ...(ragged && !state.wave ? [["", 1, "moved by two tiles"]] : [])];
// A sample has the colours of the matrices that it is seen in; without one it is hatched.
const legend = () => $("legend").replaceChildren(...SAMPLES().map(([keys, opacity, words]) => {
  const item = document.createElement("li"), wide = 16 / (keys.length || 1), hatched = { fill: "url(#picture-mask)", stroke: "var(--mask)" };
  const parts = keys ? [...keys].map((key, i) => rect(i * wide, 0, wide, 16, { fill: `var(--${key})`, opacity })) : [rect(0.5, 0.5, 15, 15, hatched)];
  item.append(el("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, ...parts), words);
  return item;
}));

let drawn = 0;
new ResizeObserver(() => {
  if (Math.abs(room()[0] - drawn) < 1) return;
  drawn = room()[0];
  layOut();
  show();
}).observe(picture.parentElement);
drawn = room()[0];
layOut();
legend();
go(F.start ? F.start[0] : 0, F.start ? F.start[1] : 0);
if (!F.start && !matchMedia("(prefers-reduced-motion: reduce)").matches) play();
window.tiling = { F, state, place, stepOf, moveOf, sharing, go, programOf, stepsOf };
