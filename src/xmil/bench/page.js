// The tables and plots of a run's page, from the JSON in it.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const colours = JSON.parse(document.getElementById("colours").textContent);
const titles = JSON.parse(document.getElementById("names").textContent);
const make = (tag, text, cls) => { const e = document.createElement(tag); if (text !== undefined) e.textContent = text; if (cls) e.className = cls; return e; };
const number = (v, d = 3) => v === null || v === undefined ? "–" : v.toFixed(d);
const colour = (m) => colours[m.split(/[:@]/)[0]] || "#0072B2";
const mean = (list) => list.reduce((a, b) => a + b, 0) / Math.max(1, list.length);

function methodsOf(suite) {
  const names = [];
  for (const c of suite.columns) for (const r of c.rows) if (!names.includes(r.method)) names.push(r.method);
  return names;
}
function rowOf(column, method) { return column.rows.find((r) => r.method === method); }
function cellOf(column, method, measure) { const row = rowOf(column, method); return row && row.cells[measure]; }
function kindOf(suite, method) { for (const c of suite.columns) { const r = rowOf(c, method); if (r) return r.kind; } return "method"; }
function bestOf(column, measure) { const v = column.verdicts.find((v) => v.measure === measure); return v && v.best; }

function drawTable(suite, state) {
  const table = make("table"), head = make("thead"), row = make("tr");
  const first = make("th", "method"); first.onclick = () => { state.sort = null; draw(suite, state); }; row.append(first);
  suite.columns.forEach((c, i) => {
    const th = make("th", c.problem + (state.sort === i ? (state.down ? " ▼" : " ▲") : ""));
    th.append(make("small", c.model), make("small", "AUROC " + number(mean(Object.values(c.auroc)), 2) + ", " + c.counted + " of " + c.repetitions));
    th.title = "Bag AUROC of the models, and how many of the repetitions learned the task";
    th.onclick = () => { state.down = state.sort === i ? !state.down : state.better > 0; state.sort = i; draw(suite, state); };
    row.append(th);
  });
  head.append(row); table.append(head);
  const body = make("tbody");
  let names = methodsOf(suite);
  if (state.sort !== null) {
    const value = (m) => { const cell = cellOf(suite.columns[state.sort], m, state.measure); return cell && cell.estimate !== null ? cell.estimate : (state.down ? -Infinity : Infinity); };
    names = [...names].sort((a, b) => state.down ? value(b) - value(a) : value(a) - value(b));
  }
  for (const name of names) {
    const tr = make("tr", undefined, kindOf(suite, name)); tr.append(make("td", titles[name] ?? name));
    for (const c of suite.columns) {
      const cell = cellOf(c, name, state.measure);
      const td = make("td");
      if (!cell || cell.estimate === null) { td.textContent = c.status !== "measured" && rowOf(c, name) ? c.status : "–"; td.className = "none"; }
      else {
        td.textContent = number(cell.estimate);
        td.append(make("small", cell.low === null ? "no interval" : number(cell.low) + " to " + number(cell.high)));
        if (cell.paper !== null && cell.paper !== undefined) td.append(make("small", "paper " + number(cell.paper, 2) + ", " + (cell.estimate - cell.paper >= 0 ? "+" : "") + number(cell.estimate - cell.paper)));
        if (bestOf(c, state.measure) === name) td.className = "best";
      }
      tr.append(td);
    }
    body.append(tr);
  }
  table.append(body);
  return table;
}

function drawPlot(suite, state, column) {
  const NS = "http://www.w3.org/2000/svg", names = methodsOf(suite).filter((m) => { const c = cellOf(column, m, state.measure); return c && c.estimate !== null; });
  const cells = names.map((m) => cellOf(column, m, state.measure));
  const low = Math.min(...cells.map((c) => c.low ?? c.estimate)), high = Math.max(...cells.map((c) => c.high ?? c.estimate));
  const pad = (high - low || 1) * 0.06, left = 96, width = 300, step = 15, x = (v) => left + (width - left - 8) * (v - low + pad) / (high - low + 2 * pad);
  const svg = document.createElementNS(NS, "svg"); svg.setAttribute("width", width); svg.setAttribute("height", names.length * step + 22);
  const add = (tag, set, text) => { const e = document.createElementNS(NS, tag); for (const k in set) e.setAttribute(k, set[k]); if (text !== undefined) e.textContent = text; svg.append(e); };
  names.forEach((m, i) => {
    const y = i * step + 9, c = cells[i], title = titles[m] ?? m;
    add("text", { x: left - 6, y: y + 3, "text-anchor": "end" }, title.length > 16 ? title.slice(0, 15) + "…" : title);
    add("line", { x1: left, x2: width - 8, y1: y, y2: y, stroke: "var(--line)" });
    if (c.low !== null) add("line", { x1: x(c.low), x2: x(c.high), y1: y, y2: y, stroke: colour(m), "stroke-width": 2 });
    add("circle", { cx: x(c.estimate), cy: y, r: 3.5, fill: colour(m) });
  });
  const base = names.length * step + 14;
  add("text", { x: x(low), y: base, "text-anchor": "start" }, number(low, 2)); add("text", { x: x(high), y: base, "text-anchor": "end" }, number(high, 2));
  const figure = make("figure"); figure.append(svg, make("figcaption", column.problem + ", " + column.model)); return figure;
}

function drawAgreement(suite, into) {
  const a = suite.agreement; if (!a.measures.length) { into.textContent = "No column to compare by."; return; }
  const title = Object.fromEntries(suite.measures.map((m) => [m.name, m.title]));
  const table = make("table"), head = make("tr"); head.append(make("th", "Kendall's tau, mean of " + a.columns + " columns"));
  a.measures.forEach((m) => head.append(make("th", title[m])));
  table.append(head);
  a.measures.forEach((m, i) => { const tr = make("tr"); tr.append(make("td", title[m])); a.tau[i].forEach((v) => { const td = make("td", number(v, 2)); if (v !== null) td.style.background = v >= 0 ? `rgba(0,114,178,${0.35 * v})` : `rgba(213,94,0,${-0.35 * v})`; tr.append(td); }); table.append(tr); });
  into.append(table);
}

function drawCost(suite, into) {
  const table = make("table"), head = make("tr"); ["method", "forward passes", "ms a bag"].forEach((t) => head.append(make("th", t))); table.append(head);
  for (const m of methodsOf(suite)) {
    const rows = suite.columns.map((c) => rowOf(c, m)).filter(Boolean), tr = make("tr");
    tr.append(make("td", titles[m] ?? m), make("td", number(mean(rows.map((r) => r.forward_passes)), 1)), make("td", number(1000 * mean(rows.map((r) => r.seconds_per_bag)), 2))); table.append(tr);
  }
  into.append(table, make("p", "All classes of a bag, mean over the columns; the time of the method over the time of one forward pass over the same bags, measured beside it. These two figures vary from run to run."));
}

function csv(suite) {
  const lines = ["problem,model,method,measure,mean,low,high,std,place,paper"];
  for (const c of suite.columns) for (const r of c.rows) for (const [m, v] of Object.entries(r.cells)) lines.push([c.problem, c.model, r.method, m, v.estimate, v.low, v.high, v.std, v.place ?? "", v.paper ?? ""].join(","));
  return lines.join("\n") + "\n";
}

function draw(suite, state) {
  const section = document.querySelector(`[data-suite="${suite.name}"]`);
  section.querySelector(".table").replaceChildren(drawTable(suite, state));
  section.querySelector(".plot").replaceChildren(...suite.columns.filter((c) => c.status === "measured").map((c) => drawPlot(suite, state, c)));
}

document.getElementById("save").href = URL.createObjectURL(new Blob([JSON.stringify(data, null, 1)], { type: "application/json" }));
for (const suite of data.suites) {
  const section = document.querySelector(`[data-suite="${suite.name}"]`), tools = section.querySelector(".tools");
  const state = { measure: suite.measures[0].name, better: suite.measures[0].better, sort: null, down: true };
  const choose = make("select"); choose.setAttribute("aria-label", "measure");
  for (const m of suite.measures) { const o = make("option", m.title); o.value = m.name; choose.append(o); }
  choose.onchange = () => { state.measure = choose.value; state.better = suite.measures.find((m) => m.name === choose.value).better; draw(suite, state); };
  const save = make("a", "Table as CSV"); save.download = suite.name + ".csv"; save.href = URL.createObjectURL(new Blob([csv(suite)], { type: "text/csv" }));
  tools.append(choose, save);
  draw(suite, state); drawAgreement(suite, section.querySelector(".agreement")); drawCost(suite, section.querySelector(".cost"));
}
