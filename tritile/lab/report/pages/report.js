"use strict";
// Filter all at once: give matching rows to every figure, and hide other rows of tables.
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const form = document.getElementById("filters");
  const problem = document.getElementById("problem");
  const store = document.getElementById("store");
  const FACETS = ["op", "suite", "dtype", "layout"];

  const unpacked = ({ count, columns }) =>
    Array.from({ length: count }, (_, i) =>
      Object.fromEntries(
        Object.entries(columns).map(([name, c]) => [name, c.words ? c.words[c.at[i]] : c[i]])));
  const rows = Object.fromEntries(Object.entries(page.rows).map(([name, packed]) => [name, unpacked(packed)]));
  for (const name of new Set(rows.searches.map((row) => row.store))) store?.add(new Option(name));

  const choice = (name) => form.elements[name]?.value ?? "";
  const has = (value, wanted) =>
    wanted === "" || (Array.isArray(value) ? value.includes(wanted) : value === wanted);
  const matches = (row) => FACETS.every((facet) => has(row[facet], choice(facet)));

  /** What the filters leave of each kind of rows. */
  function shown() {
    const baseline = choice("baseline");
    const results = rows.results.filter((row) => matches(row) && (baseline === "" || row[baseline] !== null));
    const searches = rows.searches.filter(matches);
    const kept = new Set(searches.filter((row) => has(row.store, store?.value ?? "")).map((row) => row.s));
    return {
      results, searches,
      progress: rows.progress.filter((row) => kept.has(row.s)),
      kept,
    };
  }

  function refillProblems(searches) {
    if (!problem) return [];
    const before = problem.value;
    const mapped = searches.filter((row) => row.mapped);
    const option = (row) => new Option(`${row.problem} (${row.configs} configs)`, row.s);
    problem.replaceChildren(...mapped.map(option));
    if (mapped.some((row) => String(row.s) === before)) problem.value = before;
    problem.disabled = mapped.length === 0;
    return mapped.length ? rows.cells.filter((row) => row.s === Number(problem.value)) : [];
  }

  function cell(kind, text, number) {
    const made = document.createElement(kind);
    made.textContent = text;
    if (kind === "th") made.scope = "row";
    if (number) made.className = "n";
    return made;
  }

  /** The table of the heat map: its problem's tiles, fastest first. */
  function tabulate(cells) {
    const body = document.querySelector("#heatmap tbody");
    if (!body) return;
    const sorted = [...cells].sort((a, b) => (a.ratio ?? Infinity) - (b.ratio ?? Infinity));
    body.replaceChildren(...sorted.map((row) => {
      const line = document.createElement("tr");
      const numbers = [row.x, row.us?.toFixed(2) ?? "failed", row.ratio?.toFixed(3) ?? "", row.configs];
      line.append(cell("th", row.y, true), ...numbers.map((value) => cell("td", value, true)),
        cell("td", row.config));
      return line;
    }));
    document.querySelectorAll("#heatmap th[aria-sort]").forEach((head) => head.removeAttribute("aria-sort"));
  }

  // Make a view for each figure, anew when the theme or the kind of screen changes.
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 640px)");
  const views = new Map();
  let now = {};

  // Return copies of the rows that a figure draws, as Vega marks the rows it is given.
  const DRAWN = {
    roofline: (row) => row.op === "matmul",
    bandwidth: (row) => row.op === "permute",
    accuracy: (row) => row.over > 0,
  };
  const drawable = (figure) => now[figure.data].filter(DRAWN[figure.name] ?? (() => true)).map((row) => ({ ...row }));

  function signals(figure, set) {
    if (figure.name === "speedups") set("baseline", choice("baseline"));
    if (figure.name === "heatmap" && problem.value) {
      const row = rows.searches[Number(problem.value)];
      set("axes", `${row.down} (down) by ${row.across} (across)`);
    }
  }

  async function draw(figure) {
    const theme = dark.matches ? "dark" : "light";
    const spec = structuredClone(figure.spec[theme]);
    if (narrow.matches) {
      Object.assign(spec.config.legend, { columns: 3, columnPadding: 10, labelFontSize: 11, gradientLength: 160 });
      Object.assign(spec.config.axis, { labelLimit: 120, titleFontSize: 11, labelFontSize: 10 });
    }
    spec.data.find((data) => data.name === figure.data).values = drawable(figure);
    // Log errors only: a filter may leave a layer of a figure empty.
    const options = { mode: "vega", renderer: "svg", actions: false, tooltip: { theme }, logLevel: 1 };
    const place = document.querySelector(`#${figure.name} .plot`);
    views.set(figure.name, (await vegaEmbed(place, spec, options)).view);
  }

  async function update(figure) {
    const own = drawable(figure);
    const section = document.getElementById(figure.name);
    section.querySelector(".plot").hidden = own.length === 0;
    section.querySelector(".nothing").hidden = own.length > 0;
    if (own.length === 0) return;
    if (!views.has(figure.name)) await draw(figure);
    const view = views.get(figure.name).data(figure.data, own);
    signals(figure, (name, value) => view.signal(name, value));
    await view.runAsync();
  }

  let working = Promise.resolve();
  function later(work) {
    document.body.setAttribute("aria-busy", "true");
    const mine = working.then(work, work).finally(() => {
      if (mine === working) document.body.removeAttribute("aria-busy");
    });
    working = mine;
  }

  function filter() {
    now = shown();
    now.cells = refillProblems(now.searches);
    const keys = new Set([
      ...now.results.flatMap((row) => [`r${row.r}`, `g ${row.suite} ${row.dtype} ${row.layout}`]),
      ...[...now.kept].map((s) => `s${s}`),
    ]);
    for (const line of document.querySelectorAll("tr[data-row]")) line.hidden = !keys.has(line.dataset.row);
    tabulate(now.cells);
    document.getElementById("count").textContent = `${now.results.length} of ${rows.results.length} results`;
  }

  function apply() {
    filter();
    later(() => Promise.all(page.figures.map(update)));
  }

  // Keep the filter in the address, so that a view can be shared.
  function remember() {
    const words = new URLSearchParams();
    for (const select of form.querySelectorAll("select")) if (select.value) words.set(select.name, select.value);
    history.replaceState(null, "", `#${words}`);
  }

  function recall() {
    const words = new URLSearchParams(location.hash.slice(1));
    for (const select of form.querySelectorAll("select")) {
      const wanted = words.get(select.name) ?? "";
      select.value = [...select.options].some((option) => option.value === wanted) ? wanted : "";
    }
  }

  function sort(button) {
    const head = button.closest("th");
    const body = head.closest("table").tBodies[0];
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const number = head.classList.contains("n");
    const text = (line) => line.children[head.cellIndex].textContent;
    const value = (line) => (Number.isNaN(parseFloat(text(line))) ? Infinity : parseFloat(text(line)));
    const order = (a, b) => (number ? value(a) - value(b) || 0 : text(a).localeCompare(text(b), "en", { numeric: true }));
    body.append(...[...body.rows].sort((a, b) => (up ? order(a, b) : order(b, a))));
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("thead button");
    if (button) sort(button);
    // Links to figures keep the filter in the address.
    const link = event.target.closest('a[href^="#"]');
    const target = link && document.querySelector(link.getAttribute("href"));
    if (!target) return;
    event.preventDefault();
    target.tabIndex = -1;
    target.focus({ preventScroll: true });
    target.scrollIntoView();
  });
  form.addEventListener("change", () => { remember(); apply(); });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => later(() => {  // fields are reset after this event
    return new Promise((done) => setTimeout(done)).then(() => { remember(); apply(); });
  }));
  problem?.addEventListener("change", apply);
  store?.addEventListener("change", apply);
  addEventListener("hashchange", () => { if (location.hash.includes("=")) { recall(); apply(); } });
  const redraw = () => later(() => {
    for (const view of views.values()) view.finalize();
    views.clear();
    return Promise.all(page.figures.map(update));
  });
  dark.addEventListener("change", redraw);
  narrow.addEventListener("change", redraw);

  recall();
  filter();
  redraw();
})();
